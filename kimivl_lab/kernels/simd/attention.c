// softmax(q k^T / sqrt(d)) v of every image and head, float32, in vectors. Nothing of size n x n is written.
//
// It works on transposes: S^T = K Q^T, then O^T = V^T P^T. So a query is a lane of a vector: the softmax's maximum and
// sum need no sum across lanes, any d fills whole vectors, and padding is at most WIDTH - 1 queries an image. Both
// products are the same loop: a number of K or V, broadcast, times COLUMNS vectors of queries, for ROWS of them, which
// fills the registers with sums: 24 of 32 in AVX-512, 12 of 16 in AVX2.
//
// Keys come in runs of RUN. A run's scores, weights and sums stay in the first-level cache. Its sums start at zero and
// are then added to O^T, which is rescaled in the same step to the maximum that the run has raised: short sums round
// less.
#include "tasks.h"

#include <float.h>
#include <immintrin.h>
#include <omp.h>
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#define COLUMNS 4
typedef __m512 vec;
#define SPLAT _mm512_set1_ps
#define MAX _mm512_max_ps
#else
#define WIDTH 8
#define COLUMNS 2
typedef __m256 vec;
#define SPLAT _mm256_set1_ps
#define MAX _mm256_max_ps
#endif
#define ROWS 6
#define RUN 48                  // keys, a multiple of ROWS
#define SIDE (COLUMNS * WIDTH)  // queries of a block
#define UNROLL _Pragma("GCC unroll 8")

typedef struct {
  const float *data;
  ptrdiff_t row, head;  // strides in numbers
} operand;

typedef struct {
  operand q, k, v;
  float *out;  // (rows, heads, d), contiguous
  int heads, d;
  float scale;
} problem;

// A thread's memory: K (n, d) and V (n, wide) of a task, and for one block of queries Q^T, S^T and O^T, (.., SIDE) each.
typedef struct {
  float *queries, *scores, *o, *keys, *values;
} memory;

INLINE int up(int a, int b) { return ceil_div(a, b) * b; }
INLINE vec load(const float *from) {
  vec x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

// 2^t for t <= 0: a polynomial of t's fraction (minimax, relative error 8.3e-8, where float32 rounds by 6e-8), times
// 2^floor(t). 1 for 0, 0 for -infinity, NaN for NaN.
INLINE vec exp2_vec(vec t) {
#if WIDTH == 16
  const vec fraction = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
#else
  t = _mm256_max_ps(SPLAT(-127), t);  // 2^-127 becomes 0 below; the second operand where one is NaN
  const vec floor = _mm256_floor_ps(t), fraction = t - floor;
#endif
  vec y = SPLAT(0.00186713007f);
  y = y * fraction + SPLAT(0.00901703032f);
  y = y * fraction + SPLAT(0.0557999131f);
  y = y * fraction + SPLAT(0.24016445f);
  y = y * fraction + SPLAT(0.693151312f);
  y = y * fraction + SPLAT(1);
#if WIDTH == 16
  return _mm512_scalef_ps(y, t);
#else
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(floor), _mm256_set1_epi32(127));
  return y * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
#endif
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

// Q^T (d, SIDE) of n queries; the lanes from there to `padded` are zeros.
INLINE void pack_queries(const float *q, ptrdiff_t row, int n, int padded, int d, float *to) {
  for (int g = 0; g < padded; g += 8)
    for (int c = 0; c < d; c += 8) {
      __m256 x[8];
      for (int i = 0; i < 8; i++) {
        const int there = g + i < n;
        x[i] = _mm256_maskload_ps(there ? q + (g + i) * row + c : q, lanes(there ? d - c : 0));
      }
      transpose(x);
      for (int i = 0; i < 8; i++) _mm256_store_ps(to + (c + i) * SIDE + g, x[i]);
    }
}

// One image's rows of K or V, from strided to (rows, wide); numbers past d and rows past n are zeros.
INLINE void pack_rows(const operand *x, const task *t, int d, int wide, int rows, float *to) {
  const float *from = x->data + t->start * x->row + t->head * x->head;
  for (int r = 0; r < t->n; r++, from += x->row, to += wide) {
    memcpy(to, from, d * sizeof *to);
    memset(to + d, 0, (wide - d) * sizeof *to);
  }
  memset(to, 0, (size_t)(rows - t->n) * wide * sizeof *to);
}

// O^T / sum becomes n rows of the result.
INLINE void write_rows(const float *o, const float *sum, float *out, ptrdiff_t row, int n, int d) {
  for (int g = 0; g < n; g += 8) {
    const __m256 share = _mm256_set1_ps(1) / _mm256_loadu_ps(sum + g);
    for (int c = 0; c < d; c += 8) {
      __m256 x[8];
      for (int i = 0; i < 8; i++) x[i] = _mm256_load_ps(o + (c + i) * SIDE + g) * share;
      transpose(x);
      for (int i = 0; i < 8 && g + i < n; i++) _mm256_maskstore_ps(out + (g + i) * row + c, lanes(d - c), x[i]);
    }
  }
}

// A block of `queries` queries in `width` vectors against all n keys of its image.
INLINE void attend_block(const problem *p, const memory *m, const float *q, float *out, int n, int queries, const int d,
                         const int width) {
  const int wide = up(d, ROWS);
  vec tile[ROWS][COLUMNS], top[COLUMNS], sum[COLUMNS], factor[COLUMNS];
  const vec scale = SPLAT(p->scale * LOG2_E);  // of differences: a product rounded before would be off by more
  pack_queries(q, p->q.row, queries, width * WIDTH, d, m->queries);
  for (int j = 0; j < width; j++) {
    top[j] = SPLAT(-FLT_MAX);  // finite: a run may be -infinity throughout
    sum[j] = SPLAT(0);
    for (int c = 0; c < wide; c++) store(m->o + c * SIDE + j * WIDTH, SPLAT(0));
  }
  for (int at = 0; at < n; at += RUN) {
    const int rows = n - at < RUN ? n - at : RUN;
    for (int r = 0; r < rows; r += ROWS) {
      multiply(m->keys + (size_t)(at + r) * d, 1, d, m->queries, d, width, tile);
      UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int j = 0; j < width; j++) store(m->scores + (r + i) * SIDE + j * WIDTH, tile[i][j]);
    }
    for (int j = 0; j < width; j++) {  // a maximum may pass over a NaN, which makes its weight and all sums NaN anyway
      vec here = top[j], part = SPLAT(0);
      for (int r = 0; r < rows; r++) here = MAX(here, load(m->scores + r * SIDE + j * WIDTH));
      factor[j] = exp2_vec((top[j] - here) * scale);
      top[j] = here;
      for (int r = 0; r < rows; r++) {
        float *x = m->scores + r * SIDE + j * WIDTH;
        const vec weight = exp2_vec((load(x) - here) * scale);
        store(x, weight);
        part += weight;
      }
      sum[j] = sum[j] * factor[j] + part;
    }
    for (int c = 0; c < wide; c += ROWS) {
      multiply(m->values + (size_t)at * wide + c, wide, 1, m->scores, rows, width, tile);
      UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < width; j++) {
        float *x = m->o + (c + i) * SIDE + j * WIDTH;
        store(x, load(x) * factor[j] + tile[i][j]);
      }
    }
  }
  float sums[SIDE];
  for (int j = 0; j < width; j++) store(sums + j * WIDTH, sum[j]);
  write_rows(m->o, sums, out, (ptrdiff_t)p->heads * d, queries, d);
}

INLINE void attend(const problem *p, const task *t, float *scratch, const int d) {
  const int wide = up(d, ROWS);
  memory m = {.queries = scratch};
  m.scores = m.queries + up(d, 8) * SIDE;
  m.o = m.scores + RUN * SIDE;
  m.keys = m.o + up(wide, 8) * SIDE;
  m.values = m.keys + (size_t)up(t->n, ROWS) * d;
  pack_rows(&p->k, t, d, d, up(t->n, ROWS), m.keys);
  pack_rows(&p->v, t, d, wide, t->n, m.values);
  const float *q = p->q.data + t->start * p->q.row + t->head * p->q.head;
  float *out = p->out + ((ptrdiff_t)t->start * p->heads + t->head) * d;
  const int vectors = ceil_div(t->last - t->first, WIDTH), blocks = ceil_div(vectors, COLUMNS);
  for (int b = 0; b < blocks; b++) {  // of nearly equal size
    const int from = (int64_t)vectors * b / blocks, width = (int64_t)vectors * (b + 1) / blocks - from;
    const int first = t->first + from * WIDTH;
    const int queries = t->last - first < width * WIDTH ? t->last - first : width * WIDTH;
    const float *q_b = q + first * p->q.row;
    float *out_b = out + (ptrdiff_t)first * p->heads * d;
    if (width == 1) attend_block(p, &m, q_b, out_b, t->n, queries, d, 1);
    if (width == 2) attend_block(p, &m, q_b, out_b, t->n, queries, d, 2);
#if COLUMNS == 4
    if (width == 3) attend_block(p, &m, q_b, out_b, t->n, queries, d, 3);
    if (width == 4) attend_block(p, &m, q_b, out_b, t->n, queries, d, 4);
#endif
  }
}

// Bytes of scratch a thread needs when no image is longer than `longest`: a multiple of 64.
EXPORT size_t attention_scratch(int longest, int d) {
  const int wide = up(d, ROWS);
  const size_t numbers = (up(d, 8) + RUN + up(wide, 8)) * SIDE + (size_t)up(longest, ROWS) * d + (size_t)longest * wide;
  return (numbers + 15) / 16 * 64;
}

// q, k, v (rows, heads, d) with strides (row, head) each; offsets (images + 1,); scratch: `each` bytes a thread,
// aligned to 64. Rows that belong to no image are not written. Returns 0, or -1 when there is no memory.
EXPORT int attention(const float *q, const float *k, const float *v, const int64_t *strides, float *out,
                     const int32_t *offsets, int images, int heads, int d, float scale, int threads, char *scratch,
                     size_t each) {
  const problem p = {{q, strides[0], strides[1]}, {k, strides[2], strides[3]}, {v, strides[4], strides[5]}, out, heads,
                     d, scale};
  int count;
  task *tasks = list_tasks(offsets, images, heads, threads, SIDE, &count);
  if (!tasks) return -1;
#pragma omp parallel num_threads(threads)
  {
    float *mine = (float *)(scratch + each * omp_get_thread_num());
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; i++) {
      if (d == 72)
        attend(&p, tasks + i, mine, 72);  // MoonViT's head, known when this is compiled
      else
        attend(&p, tasks + i, mine, d);
    }
  }
  free(tasks);
  return 0;
}
