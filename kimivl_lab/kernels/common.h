// What all kernels share.
#pragma once

#ifndef __x86_64__
#error "these kernels are for x86-64"  // elsewhere everything runs on torch's
#endif

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define LOG2_E 1.44269504f

INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
