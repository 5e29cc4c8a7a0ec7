"""The report: every notebook executed on this machine, and one page that shows what came out."""
