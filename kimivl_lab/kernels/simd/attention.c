// softmax(q k^T / sqrt(d)) v of every image and head, in vectors of float32. Nothing of size n x n is written. bfloat16 is
// raised where operands are packed, and the result is rounded where it is written.
//
// It works on transposes: S^T = K Q^T, then O^T = V^T P^T. So a query is a lane of a vector: the softmax's maximum and
// sum need no sum across lanes, any d fills whole vectors, and padding is at most WIDTH - 1 queries an image. Both
// products are the same loop: a number of K or V, broadcast, times COLUMNS vectors of queries, for ROWS of them, which
// fills the registers with sums: 24 of 32 in AVX-512, 12 of 16 in AVX2.
//
// Keys come in runs of RUN, and a run is used for GROUP blocks of queries, while its keys and values are in a near
// cache. A run's sums start at zero and are then added to O^T, which is rescaled in the same step to the maximum that
// the run has raised, and a score is the sum of two halves: short sums round less.
#include "common.h"

#include <float.h>
#include <immintrin.h>
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#define COLUMNS 4
#define ROWS 6
typedef __m512 vec;
#define SPLAT _mm512_set1_ps
#define MAX _mm512_max_ps
#define PICK(table, index) _mm512_permutexvar_ps((__m512i)(index), table)
#else
#define WIDTH 8
#define COLUMNS 3
#define ROWS 4
typedef __m256 vec;
#define SPLAT _mm256_set1_ps
#define MAX _mm256_max_ps
#define PICK(table, index) _mm256_permutevar8x32_ps(table, (__m256i)(index))
#endif
#define RUN 96                  // keys, a multiple of ROWS
#define GROUP 4                 // blocks
#define SIDE (COLUMNS * WIDTH)  // queries of a block
#define UNROLL _Pragma("GCC unroll 8")

#include "tasks.h"

typedef uint32_t bits __attribute__((vector_size(sizeof(vec))));

// Queries first to first + n of an image, in `width` vectors, and what is known of them after some runs.
typedef struct {
  int first, n, width;
  float *queries, *o;  // Q^T and O^T, (.., SIDE)
  float top[SIDE], sum[SIDE];
} block;

INLINE int up(int a, int b) { return ceil_div(a, b) * b; }
INLINE vec load(const float *from) {
  vec x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

// 2^t for t <= 0. t is n + j/8 + f with |f| <= 1/16: a cubic of f (minimax, relative error 2.6e-8, where float32 rounds
// by 6e-8), times 2^(j/8) from a table, times 2^n. 1 for 0, 0 for -infinity, NaN for NaN.
INLINE vec exp2_vec(vec t) {
  static const uint32_t eighths[16] = {  // the bits of 2^(j/8), less j << 20
      0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7,
      0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
  const vec magic = SPLAT(1.5f * (1 << 20));  // a sum with it is rounded to eighths, and 8 n + j are its lowest bits
  vec table;
  memcpy(&table, eighths, sizeof table);
  t = MAX(SPLAT(-127), t);  // 2^-127 becomes 0 below; the second operand where one is NaN
  const vec sum = t + magic, f = t - (sum - magic);
  vec y = SPLAT(0.0554889319f);
  y = y * f + SPLAT(0.240257807f);
  y = y * f + SPLAT(0.693147242f);
  y = y * f + SPLAT(1);
  return y * (vec)((bits)PICK(table, sum) + ((bits)sum << 20));
}

// tile[r][j] = sum over i < steps of a[i * step + r * row] b[i * SIDE + lanes of vector j], for j < width.
INLINE void multiply(const float *a, ptrdiff_t step, ptrdiff_t row, const float *b, int steps, int width,
                     vec tile[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < width; j++) tile[r][j] = SPLAT(0);
  for (int i = 0; i < steps; i++, a += step, b += SIDE) {
    vec x[COLUMNS];
    UNROLL for (int j = 0; j < width; j++) x[j] = load(b + j * WIDTH);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const vec number = SPLAT(a[r * row]);
      UNROLL for (int j = 0; j < width; j++) tile[r][j] += number * x[j];
    }
  }
}

// Transposes 8 x 8 numbers, a row a register.
INLINE void transpose(__m256 r[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
  }
}

// Lanes below n of 8 numbers; n may be negative or too large.
INLINE __m256i lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// The first n of 8 numbers of 4 or 2 bytes, and zeros; n as in `lanes`.
INLINE __m256 load_numbers(const char *from, int n, int bytes) {
  if (bytes == 4) return _mm256_maskload_ps((const float *)from, lanes(n));
  __m128i x = _mm_setzero_si128();
  if (n > 0) memcpy(&x, from, n < 8 ? 2 * n : 16);
  return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
}

// The first n of x, n > 0, rounded to the nearest, of two to the even one.
INLINE void store_numbers(char *to, __m256 x, int n, int bytes) {
  if (bytes == 4) {
    _mm256_maskstore_ps((float *)to, lanes(n), x);
    return;
  }
  const __m256i b = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  __m256i y = _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  y = _mm256_blendv_epi8(y, _mm256_set1_epi32(0x7fc0), (__m256i)_mm256_cmp_ps(x, x, _CMP_UNORD_Q));  // NaN stays NaN
  const __m128i z = _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  memcpy(to, &z, n < 8 ? 2 * n : 16);
}

// Q^T (d, SIDE) of n queries; the lanes from there to `padded` are zeros.
INLINE void pack_queries(const char *q, ptrdiff_t row, int bytes, int n, int padded, int d, float *to) {
  for (int g = 0; g < padded; g += 8)
    for (int c = 0; c < d; c += 8) {
      __m256 x[8];
      for (int i = 0; i < 8; i++) {
        const int there = g + i < n;
        x[i] = load_numbers(there ? q + ((g + i) * row + c) * bytes : q, there ? d - c : 0, bytes);
      }
      transpose(x);
      for (int i = 0; i < 8; i++) _mm256_store_ps(to + (c + i) * SIDE + g, x[i]);
    }
}

// One image's rows of K or V, from strided to (rows, wide): numbers past d are zeros, rows past n are like the last.
INLINE void pack_rows(const operand *x, const task *t, int bytes, int d, int wide, int rows, float *to) {
  const char *from = (const char *)x->data + (t->start * x->row + t->head * x->head) * bytes;
  for (int r = 0; r < rows; r++, to += wide) {
    for (int i = 0; i < d * bytes; i += 64) _mm_prefetch(from + 8 * x->row * bytes + i, _MM_HINT_T0);
    for (int c = 0; c < d; c += 8)
      _mm256_maskstore_ps(to + c, lanes(d - c), load_numbers(from + c * bytes, d - c, bytes));
    memset(to + d, 0, (wide - d) * sizeof *to);
    if (r < t->n - 1) from += x->row * bytes;
  }
}

// O^T / sum becomes n rows of the result.
INLINE void write_rows(const float *o, const float *sum, char *out, ptrdiff_t row, int bytes, int n, int d) {
  for (int g = 0; g < n; g += 8) {
    const __m256 share = _mm256_set1_ps(1) / _mm256_loadu_ps(sum + g);
    for (int c = 0; c < d; c += 8) {
      __m256 x[8];
      for (int i = 0; i < 8; i++) x[i] = _mm256_load_ps(o + (c + i) * SIDE + g) * share;
      transpose(x);
      for (int i = 0; i < 8 && g + i < n; i++) store_numbers(out + ((g + i) * row + c) * bytes, x[i], d - c, bytes);
    }
  }
}

// A block against a run of `rows` keys.
INLINE void attend_run(block *b, const float *keys, const float *values, float *scores, int rows, float log2_scale,
                       const int d, const int width) {
  const int wide = up(d, ROWS), half = d / 2;
  vec tile[ROWS][COLUMNS], most[COLUMNS], factor[COLUMNS];
  const vec scale = SPLAT(log2_scale);  // of differences: a product rounded before would be off by more
  for (int j = 0; j < width; j++) most[j] = SPLAT(-FLT_MAX);  // finite: a run may be -infinity throughout
  for (int r = 0; r < rows; r += ROWS, keys += ROWS * d) {
    float *s = scores + r * SIDE;
    multiply(keys, 1, d, b->queries, half, width, tile);
    UNROLL for (int i = 0; i < ROWS; i++)
      UNROLL for (int j = 0; j < width; j++) store(s + i * SIDE + j * WIDTH, tile[i][j]);
    multiply(keys + half, 1, d, b->queries + half * SIDE, d - half, width, tile);
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < width; j++) {
      float *x = s + i * SIDE + j * WIDTH;
      tile[i][j] += load(x);
      most[j] = MAX(most[j], tile[i][j]);  // may pass over a NaN, which makes its weight and all sums NaN anyway
      store(x, tile[i][j]);
    }
  }
  for (int j = 0; j < width; j++) {
    const vec top = MAX(load(b->top + j * WIDTH), most[j]);
    vec part = SPLAT(0);
    factor[j] = exp2_vec((load(b->top + j * WIDTH) - top) * scale);
    for (int r = 0; r < rows; r++) {
      float *x = scores + r * SIDE + j * WIDTH;
      const vec weight = exp2_vec((load(x) - top) * scale);
      store(x, weight);
      part += weight;
    }
    store(b->top + j * WIDTH, top);
    store(b->sum + j * WIDTH, load(b->sum + j * WIDTH) * factor[j] + part);
  }
  for (int c = 0; c < wide; c += ROWS) {
    multiply(values + c, wide, 1, scores, rows, width, tile);
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < width; j++) {
      float *x = b->o + (c + i) * SIDE + j * WIDTH;
      store(x, load(x) * factor[j] + tile[i][j]);
    }
  }
}

INLINE void attend_heads_of(const problem *p, const task *t, char *scratch, const int d) {
  const int wide = up(d, ROWS), bytes = p->bytes;
  float *scores = (float *)scratch, *queries = scores + RUN * SIDE, *o = queries + GROUP * up(d, 8) * SIDE;
  float *keys = o + GROUP * up(wide, 8) * SIDE, *values = keys + (size_t)up(t->n, ROWS) * d;
  pack_rows(&p->k, t, bytes, d, d, up(t->n, ROWS), keys);
  pack_rows(&p->v, t, bytes, d, wide, t->n, values);
  const char *q = (const char *)p->q.data + (t->start * p->q.row + t->head * p->q.head) * bytes;
  char *out = (char *)p->out + ((ptrdiff_t)t->start * p->heads + t->head) * d * bytes;
  const float scale = p->scale * LOG2_E;
  const ptrdiff_t out_row = (ptrdiff_t)p->heads * d;
  const int vectors = ceil_div(t->last - t->first, WIDTH), blocks = ceil_div(vectors, COLUMNS);
  for (int first = 0; first < blocks; first += GROUP) {
    const int count = blocks - first < GROUP ? blocks - first : GROUP;
    block group[GROUP];
    for (int i = 0; i < count; i++) {  // of nearly equal size
      const int from = (int64_t)vectors * (first + i) / blocks, to = (int64_t)vectors * (first + i + 1) / blocks;
      block *b = group + i;
      *b = (block){t->first + from * WIDTH, (to - from) * WIDTH, to - from, queries + i * up(d, 8) * SIDE,
                   o + i * up(wide, 8) * SIDE};
      pack_queries(q + b->first * p->q.row * bytes, p->q.row, bytes, t->last - b->first, b->n, d, b->queries);
      if (b->n > t->last - b->first) b->n = t->last - b->first;
      for (int lane = 0; lane < SIDE; lane++) b->top[lane] = -FLT_MAX;
      memset(b->o, 0, (size_t)wide * SIDE * sizeof *o);
    }
    for (int at = 0; at < t->n; at += RUN) {
      const float *k = keys + (size_t)at * d, *v = values + (size_t)at * wide;
      const int rows = t->n - at < RUN ? t->n - at : RUN;
      for (block *b = group; b < group + count; b++) {
        if (b->width == 1) attend_run(b, k, v, scores, rows, scale, d, 1);
        if (b->width == 2) attend_run(b, k, v, scores, rows, scale, d, 2);
        if (b->width == 3) attend_run(b, k, v, scores, rows, scale, d, 3);
#if COLUMNS == 4
        if (b->width == 4) attend_run(b, k, v, scores, rows, scale, d, 4);
#endif
      }
    }
    for (block *b = group; b < group + count; b++)
      write_rows(b->o, b->sum, out + b->first * out_row * bytes, out_row, bytes, b->n, d);
  }
}

static void attend(const problem *p, const task *t, char *scratch) {
  if (p->d == 72)
    attend_heads_of(p, t, scratch, 72);  // MoonViT's head, known when this is compiled
  else
    attend_heads_of(p, t, scratch, p->d);
}

// Bytes of scratch a thread needs when no image is longer than `longest`: a multiple of 64.
EXPORT size_t attention_scratch(int longest, int d) {
  const int wide = up(d, ROWS);
  const size_t numbers = (RUN + GROUP * (up(d, 8) + up(wide, 8))) * SIDE + (size_t)up(longest, ROWS) * d +
                         (size_t)longest * wide;
  return (numbers + 15) / 16 * 64;
}
