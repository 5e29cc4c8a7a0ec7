// What all kernels share.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define LOG2_E 1.44269504f

INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
