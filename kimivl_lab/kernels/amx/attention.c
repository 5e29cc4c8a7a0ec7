// softmax(q k^T / sqrt(d)) v of every image and head, bfloat16, on the matrix unit. Nothing of size n x n is written.
//
// It works on transposes, 32 queries at a time: S^T = K Q^T, then O^T = V^T P^T. So a query is a column, the softmax's
// maximum runs down the rows, a vector holds 16 queries, and P^T comes out of the exponential as the product wants it.
// A row of ones below V^T makes the softmax's denominator a row of O^T: the sum of exactly the numbers that weigh V.
//
// Keys come in runs of RUN, with a running maximum. It is raised, and O^T rescaled, for 16 queries together and only
// when a run exceeds it for one of them by more than SLACK powers of two: until then weights stay within 2^SLACK, which
// float32 sums do not mind.
#include "tiles.h"

#include "tasks.h"

#include <float.h>
#include <string.h>

#define RUN 128       // keys whose scores and weights stay in the first-level cache: 16 KiB and 8 KiB
#define SLACK 8.0f    // in powers of two

INLINE int key_steps(int d) { return ceil_div(d, 32); }
INLINE int value_tiles(int d) { return ceil_div(d + 1, 16); }

// One image's keys, (n / 16, steps) tiles of 16 keys by 32 channels; rows past n are zeros.
INLINE void pack_keys(const bf16 *k, ptrdiff_t row, int n, int d, bf16 *to) {
  for (int r = 0; r < ceil_div(n, 32) * 32; r++)
    for (int j = 0; j < key_steps(d); j++) {
      const __mmask32 mask = r < n ? lanes(d - 32 * j) : 0;
      _mm512_store_si512(to + ((size_t)(r / 16) * key_steps(d) + j) * TILE + r % 16 * 32,
                         _mm512_maskz_loadu_epi16(mask, k + r * row + 32 * j));
    }
}

// One image's V^T and below it a row of ones, (n / 32, tiles) tiles of 16 channels by 32 keys.
INLINE void pack_values(const bf16 *v, ptrdiff_t row, int n, int d, bf16 *to) {
  for (int b = 0; b < n; b += 32)
    for (int j = 0; j < value_tiles(d); j++, to += TILE) {
      __m512i x[16];  // a word: one channel of two keys
      for (int i = 0; i < 16; i++) {
        const int r = b + 2 * i;
        const __mmask16 mask = lanes(d - 16 * j);
        const __m256i even = _mm256_maskz_loadu_epi16(r < n ? mask : 0, v + r * row + 16 * j);
        const __m256i odd = _mm256_maskz_loadu_epi16(r + 1 < n ? mask : 0, v + (r + 1) * row + 16 * j);
        x[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
      }
      transpose(x);
      if (j == d / 16) x[d % 16] = _mm512_set1_epi16(0x3f80);
      for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, x[i]);
    }
}

// Q^T of 32 queries, (steps, 2) tiles by pairs of channels; queries past n are zeros.
INLINE void pack_queries(const bf16 *q, ptrdiff_t row, int n, int d, bf16 *to) {
  for (int j = 0; j < key_steps(d); j++)
    for (int g = 0; g < 32; g += 16, to += TILE) {
      __m512i x[16];
      for (int i = 0; i < 16; i++)
        x[i] = _mm512_maskz_loadu_epi16(g + i < n ? lanes(d - 32 * j) : 0, q + (g + i) * row + 32 * j);
      transpose(x);
      for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, x[i]);
    }
}

// S^T, (rows, 32), of `rows` keys, a multiple of 32; keys from `valid` on get -infinity.
INLINE void make_scores(const bf16 *keys, const bf16 *queries, int rows, int valid, int steps, float *scores) {
  for (int r = 0; r < rows; r += 32, keys += 2 * steps * TILE) {
    zero_block();
    multiply_block(keys, (size_t)steps * TILE, TILE, queries, 2 * TILE, steps, 0, NULL, 0);
    store_block(scores + r * SIDE, 0);
  }
  for (int r = valid; r < rows; r++)
    for (int g = 0; g < 32; g += 16) _mm512_store_ps(scores + r * SIDE + g, _mm512_set1_ps(-INFINITY));
}

// The largest score of each of 16 queries. It may pass over a NaN, which makes its weight and all sums NaN anyway.
INLINE __m512 column_maximum(const float *scores, int rows) {
  __m512 even = _mm512_load_ps(scores), odd = even;
  for (int r = 0; r < rows; r += 2) {
    even = _mm512_max_ps(even, _mm512_load_ps(scores + r * SIDE));
    odd = _mm512_max_ps(odd, _mm512_load_ps(scores + (r + 1) * SIDE));
  }
  return _mm512_max_ps(even, odd);
}

// Two rows of P^T = 2^((S^T - top) scale) for 16 queries, as one row of a tile. Scaled after the difference: a product
// rounded before it could be off by more than the exponential bears.
INLINE __m512i weigh(const float *scores, __m512 scale, __m512 top) {
  const __m512 even = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores), top), scale);
  const __m512 odd = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores + SIDE), top), scale);
  return interleave(exp2_ps(even), exp2_ps(odd));
}

// O^T, (16 tiles, 32) float32, becomes up to 32 rows of the result.
INLINE void write_rows(const float *o, bf16 *out, ptrdiff_t row, int n, int d) {
  for (int g = 0; g < 32; g += 16) {
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(o + d * SIDE + g));
    for (int j = 0; j < d; j += 16) {
      __m512i x[16];
      for (int i = 0; i < 16; i++)
        x[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(o + (j + i) * SIDE + g), share));
      transpose(x);
      for (int i = 0; i < 16 && g + i < n; i++)
        _mm256_mask_storeu_epi16(out + (g + i) * row + j, (__mmask16)lanes(d - j),
                                 (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(x[i])));
    }
  }
}

INLINE void attend_heads_of(const problem *p, const task *t, char *scratch, const int d) {
  const int steps = key_steps(d), tiles = value_tiles(d), n = t->n, padded = ceil_div(n, 32) * 32;
  bf16 *keys = (bf16 *)scratch;
  bf16 *values = keys + (size_t)padded * steps * 32;
  bf16 *queries = values + (size_t)padded * tiles * 16;
  bf16 *weights = queries + steps * 2 * TILE;        // P^T, (RUN / 32, 2) tiles by pairs of keys
  float *scores = (float *)(weights + RUN * SIDE);   // S^T, (RUN, 32)
  float *o = scores + RUN * SIDE;                    // O^T, (16 tiles, 32)
  const bf16 *q = (const bf16 *)p->q.data + t->start * p->q.row + t->head * p->q.head;
  bf16 *out = (bf16 *)p->out + ((ptrdiff_t)t->start * p->heads + t->head) * d;
  const __m512 scale = _mm512_set1_ps(p->scale * LOG2_E), slack = _mm512_set1_ps(SLACK / (p->scale * LOG2_E));

  pack_keys((const bf16 *)p->k.data + t->start * p->k.row + t->head * p->k.head, p->k.row, n, d, keys);
  pack_values((const bf16 *)p->v.data + t->start * p->v.row + t->head * p->v.head, p->v.row, n, d, values);
  for (int first = t->first; first < t->last; first += SIDE) {
    pack_queries(q + first * p->q.row, p->q.row, t->last - first, d, queries);
    memset(o, 0, (size_t)tiles * 16 * SIDE * 4);
    __m512 top[2] = {_mm512_set1_ps(-FLT_MAX), _mm512_set1_ps(-FLT_MAX)};  // finite: a run may be -infinity throughout
    for (int at = 0; at < padded; at += RUN) {
      const int rows = padded - at < RUN ? padded - at : RUN;
      make_scores(keys + (size_t)at * steps * 32, queries, rows, n - at < rows ? n - at : rows, steps, scores);
      for (int g = 0; g < 2; g++) {
        const __m512 here = column_maximum(scores + 16 * g, rows);
        if (_mm512_cmp_ps_mask(here, _mm512_add_ps(top[g], slack), _CMP_GT_OQ)) {
          const __m512 raised = _mm512_max_ps(here, top[g]);
          const __m512 factor = exp2_ps(_mm512_mul_ps(_mm512_sub_ps(top[g], raised), scale));
          for (int i = 0; at > 0 && i < tiles * 16; i++) {
            float *x = o + i * SIDE + 16 * g;
            _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), factor));
          }
          top[g] = raised;
        }
        for (int r = 0; r < rows; r += 2)
          _mm512_store_si512(weights + (r / 32 * 2 + g) * TILE + r % 32 * 16,
                             weigh(scores + r * SIDE + 16 * g, scale, top[g]));
      }
      for (int j = 0; j < tiles; j += 2) {
        const int half = j + 1 == tiles;
        load_block(o + j * 16 * SIDE, half);
        multiply_block(values + ((size_t)at / 32 * tiles + j) * TILE, TILE, (size_t)tiles * TILE, weights, 2 * TILE,
                       rows / 32, half, NULL, 0);
        store_block(o + j * 16 * SIDE, half);
      }
    }
    write_rows(o, out + (ptrdiff_t)first * p->heads * d, (ptrdiff_t)p->heads * d, t->last - first, d);
  }
}

static void attend(const problem *p, const task *t, char *scratch) {
  const unsigned modes = begin_tiles();
  if (p->d == 72)
    attend_heads_of(p, t, scratch, 72);  // MoonViT's head, known when this is compiled
  else
    attend_heads_of(p, t, scratch, p->d);
  end_tiles(modes);
}

// Bytes of scratch a thread needs when no image is longer than `longest`.
EXPORT size_t attention_scratch(int longest, int d) {
  const size_t padded = (size_t)ceil_div(longest, 32) * 32;
  return 2 * (padded * (key_steps(d) * 32 + value_tiles(d) * 16) + key_steps(d) * 2 * TILE + RUN * SIDE) +
         4 * (RUN * SIDE + value_tiles(d) * 16 * SIDE);
}
