// What the kernels share: tiles of the matrix unit (AMX) and a few vector helpers (AVX-512). bfloat16 is uint16_t here.
//
// The unit has eight registers, each a tile of 16 rows of 64 bytes. One instruction adds to a tile of 16 x 16 float32
// the product of two tiles of bfloat16:
//
//     C[i][j] += sum over k < 32 of A[i][k] B[k][j]
//
// in 16 cycles, and its sum is there after 52: a kernel keeps four of them going, and has 64 cycles to load four tiles.
//
// A holds 16 rows of 32 numbers. B is stored by pairs of k: row p holds B[2p][0], B[2p+1][0], B[2p][1], B[2p+1][1], ..
// so that a row of B is 16 words of 4 bytes, and the transpose of such words turns 16 rows of 32 numbers into a B.
#pragma once

#include "common.h"

#include <immintrin.h>
#include <omp.h>

typedef uint16_t bf16;

#define TILE 512  // numbers of bfloat16 in a tile, which is 1 KiB
#define SIDE 32   // a block is two tiles by two: 32 rows by 32 columns, in tile registers 0 to 3

// The compilers' tile instructions do not say that they read memory: nothing written before may be moved behind.
#define WRITTEN() __asm__ volatile("" ::: "memory")

// Lanes below n of a vector of 32 numbers; n may be negative or too large.
INLINE __mmask32 lanes(int n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }

// Sets this thread's tile registers up, and flushes subnormal numbers, which cost a hundred cycles each.
INLINE unsigned begin_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  WRITTEN();
  _tile_loadconfig(&config);
  const unsigned modes = _mm_getcsr();
  _mm_setcsr(modes | 0x8040);
  return modes;
}

INLINE void end_tiles(unsigned modes) {
  _tile_release();
  _mm_setcsr(modes);
}

INLINE void zero_block(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The block to and from (32, 32) float32. A half block is its upper two tiles.
INLINE void load_block(const float *c, int half) {
  WRITTEN();
  _tile_loadd(0, c, 4 * SIDE);
  _tile_loadd(1, c + 16, 4 * SIDE);
  if (half) return;
  _tile_loadd(2, c + 16 * SIDE, 4 * SIDE);
  _tile_loadd(3, c + 16 * SIDE + 16, 4 * SIDE);
}

INLINE void store_block(float *c, int half) {
  _tile_stored(0, c, 4 * SIDE);
  _tile_stored(1, c + 16, 4 * SIDE);
  if (half) return;
  _tile_stored(2, c + 16 * SIDE, 4 * SIDE);
  _tile_stored(3, c + 16 * SIDE + 16, 4 * SIDE);
}

// Adds to the block, for each of `steps` steps of 32 k, the product of the tiles a and a + below with b and b + TILE.
// a_step, b_step: numbers from one step to the next. ahead: memory to bring nearer, `lines` of 64 bytes a step.
INLINE void multiply_block(const bf16 *a, size_t below, size_t a_step, const bf16 *b, size_t b_step, int steps,
                           int half, const char *ahead, int lines) {
  WRITTEN();
  for (int j = 0; j < steps; j++, a += a_step, b += b_step) {
    for (int i = 0; i < lines; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (half) continue;
    _tile_loadd(5, a + below, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Transposes 16 x 16 words of 4 bytes, a row a register.
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

// a and b, rounded, by turns: a[0], b[0], a[1], b[1], ..
INLINE __m512i interleave(__m512 a, __m512 b) {
  const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// 2^t: a cubic of t's fraction (minimax, relative error 7.5e-5, where bfloat16 rounds by 3.9e-3), times 2^floor(t).
// 0 for -infinity, NaN for NaN.
INLINE __m512 exp2_ps(__m512 t) {
  const __m512 fraction = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
  __m512 y = _mm512_set1_ps(0.07802452f);
  y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.22606716f));
  y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.69583354f));
  y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.99992522f));
  return _mm512_scalef_ps(y, t);
}
