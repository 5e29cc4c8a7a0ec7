// RoPE-2D on queries and keys, bfloat16, in place: (re, im) -> (re cos - im sin, re sin + im cos) in float32.
//
// A vector holds 16 pairs. A row's cosines and sines are set apart once and serve all its heads.
#include "tiles.h"

#define MOST 16  // vectors of 16 pairs in a head

// qk (rows, heads, d): `heads` counts those of q and of k, one after another; row: stride in numbers; d even, at most
// 512. cos_sin (rows, d / 2, 2) float32.
EXPORT void rotate(bf16 *qk, int64_t row, const float *cos_sin, int rows, int heads, int d, int threads) {
  const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odds = _mm512_or_si512(evens, _mm512_set1_epi32(1));
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  const int vectors = ceil_div(d, 32);
#pragma omp parallel for num_threads(threads)
  for (int r = 0; r < rows; r++) {
    __m512 cosine[MOST], sine[MOST];
    for (int i = 0; i < vectors; i++) {
      const __mmask32 mask = lanes(d - 32 * i);
      const float *from = cos_sin + (size_t)r * d + 32 * i;
      const __m512 low = _mm512_maskz_loadu_ps((__mmask16)mask, from);
      const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), from + 16);
      cosine[i] = _mm512_permutex2var_ps(low, evens, high);
      sine[i] = _mm512_permutex2var_ps(low, odds, high);
    }
    bf16 *head = qk + r * row;
    for (int h = 0; h < heads; h++, head += d)
      for (int i = 0; i < vectors; i++) {
        const __mmask32 mask = lanes(d - 32 * i);
        const __m512i pairs = _mm512_maskz_loadu_epi16(mask, head + 32 * i);
        const __m512 re = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        const __m512 im = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
        const __m512 new_re = _mm512_fmsub_ps(re, cosine[i], _mm512_mul_ps(im, sine[i]));
        const __m512 new_im = _mm512_fmadd_ps(re, sine[i], _mm512_mul_ps(im, cosine[i]));
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(new_re));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(new_im));
        _mm512_mask_storeu_epi16(head + 32 * i, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
  }
}
