"""The kernel in which notebooks run: the interpreter that runs this, with figures inside the notebook.

Jupyter would take the first kernel called "python3" on JUPYTER_PATH, which may belong to another environment, and
MPLBACKEND=Agg would leave the pictures out. The report and `make notebooks` use this manager, so neither can happen.

Test: tests/test_report.py.
"""

import sys

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from traitlets import Instance

BACKEND = "module://matplotlib_inline.backend_inline"


class OwnKernelSpecs(KernelSpecManager):
    """Gives one kernel for every name."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        program = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=program, display_name="Python 3", language="python", env={"MPLBACKEND": BACKEND})


class OwnKernelManager(AsyncKernelManager):
    """Starts that kernel, whatever the notebook's metadata and the environment say."""

    kernel_spec_manager = Instance(OwnKernelSpecs, ())
