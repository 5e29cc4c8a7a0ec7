// y = activation(x W^T + bias) + residual, bfloat16, on the matrix unit.
//
// W is packed once, in panels of 32 outputs, each as (steps, 2) tiles by pairs of inputs. A task takes some rows of x
// and some panels. It packs its rows into tiles that fit the second-level cache, then takes panel after panel, each in
// chunks of CHUNK steps: a chunk's 18 KiB of W stay in the first-level cache while all rows pass by, and while they do,
// the next chunk is fetched from memory, a few lines a step (past the last one, in vain: fetching ahead never fails).
// Sums of a panel wait in float32 between its chunks, in the second-level cache, beside the packed rows.
#include "tiles.h"

#define CHUNK 9             // steps of 32 inputs
#define ROW_BYTES 1200000   // of packed rows in a task, a good half of a second-level cache of 2 MiB, and
#define MOST_ROWS 256       // rows: more do not help, for W is by then read seldom enough
#define PACKING 4           // panels

typedef struct {
  const bf16 *x, *weight, *bias, *residual;  // bias and residual may be NULL
  bf16 *y;                                   // (rows, outputs), contiguous, like residual
  int64_t x_row;                             // stride in numbers
  int inputs, outputs;
} layer;

// gelu_tanh(x) = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))
INLINE __m512 gelu_tanh(__m512 x) {
  const float slope = -2 * 0.7978845608f * LOG2_E;
  const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f * slope), _mm512_set1_ps(slope));
  const __m512 power = _mm512_mul_ps(x, cubic);
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1), exp2_ps(power)));
}

// 16 numbers of the result, in float32.
INLINE __m512 finish(const float *sum, __m256i bias, __m256i residual, int activation) {
  __m512 y = _mm512_add_ps(_mm512_load_ps(sum), widen(bias));
  if (activation) y = gelu_tanh(y);
  return _mm512_add_ps(y, widen(residual));
}

// A block of sums, of which `rows` rows count, to rows of the result from `column` on.
INLINE void write_block(const layer *l, const float *sums, int row, int rows, int column, int activation) {
  const __mmask32 mask = lanes(l->outputs - column);
  const __m512i bias = l->bias ? _mm512_maskz_loadu_epi16(mask, l->bias + column) : _mm512_setzero_si512();
  for (int r = 0; r < rows; r++, sums += SIDE) {
    const size_t at = (size_t)(row + r) * l->outputs + column;
    const __m512i residual = l->residual ? _mm512_maskz_loadu_epi16(mask, l->residual + at) : _mm512_setzero_si512();
    const __m512 low = finish(sums, _mm512_castsi512_si256(bias), _mm512_castsi512_si256(residual), activation);
    const __m512 high = finish(sums + 16, _mm512_extracti64x4_epi64(bias, 1), _mm512_extracti64x4_epi64(residual, 1),
                               activation);
    _mm512_mask_storeu_epi16(l->y + at, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// Rows of x as (chunks, rows / 16, steps of the chunk) tiles; rows and inputs past the end are zeros.
INLINE void pack_rows(const layer *l, int first, int rows, int padded, bf16 *to) {
  const int steps = ceil_div(l->inputs, 32);
  for (int at = 0; at < steps; at += CHUNK) {
    const int width = steps - at < CHUNK ? steps - at : CHUNK;
    for (int r = 0; r < padded; r++) {
      const bf16 *from = l->x + (first + r) * l->x_row;
      bf16 *row = to + (size_t)(r / 16) * width * TILE + r % 16 * 32;
      for (int j = at; j < at + width; j++, row += TILE)
        _mm512_store_si512(row, _mm512_maskz_loadu_epi16(r < rows ? lanes(l->inputs - 32 * j) : 0, from + 32 * j));
    }
    to += (size_t)padded / 16 * width * TILE;
  }
}

// Rows `first` to `first + rows` of the result, in panels `panel` to `last`.
INLINE void multiply_rows(const layer *l, int first, int rows, int panel, int last, char *scratch, int activation) {
  const int steps = ceil_div(l->inputs, 32), padded = ceil_div(rows, SIDE) * SIDE;
  bf16 *packed = (bf16 *)scratch;
  float *sums = (float *)(packed + (size_t)padded * steps * 32);  // (rows / 32) blocks
  pack_rows(l, first, rows, padded, packed);
  for (; panel < last; panel++)
    for (int at = 0; at < steps; at += CHUNK) {
      const int width = steps - at < CHUNK ? steps - at : CHUNK;
      const bf16 *weight = l->weight + ((size_t)panel * steps + at) * 2 * TILE;
      const char *next = (const char *)(weight + (size_t)width * 2 * TILE);
      const int lines = ceil_div(CHUNK * 2 * TILE * 2 / 64, width * (padded / SIDE));  // a step: all rows, a chunk
      for (int r = 0; r < padded; r += SIDE) {
        float *block = sums + r * SIDE;
        if (at == 0)
          zero_block();
        else
          load_block(block, 0);
        multiply_block(packed + ((size_t)at * padded + (size_t)r * width) * 32, (size_t)width * TILE, TILE, weight,
                       2 * TILE, width, 0, next + (size_t)r / SIDE * width * lines * 64, lines);
        store_block(block, 0);
        if (at + width < steps) continue;
        write_block(l, block, first + r, rows - r < SIDE ? rows - r : SIDE, panel * SIDE, activation);
      }
    }
}

// Rows of a task: what the cache holds, or less, for tasks of one size.
static int rows_of_task(int rows, int inputs) {
  int most = ROW_BYTES / (64 * ceil_div(inputs, 32)) / SIDE * SIDE;
  most = most > MOST_ROWS ? MOST_ROWS : most < SIDE ? SIDE : most;
  return ceil_div(ceil_div(rows, ceil_div(rows, most)), SIDE) * SIDE;
}

// Panels of a task: all, or a part, so that the threads end together. Every task packs its rows, which takes as long as
// PACKING panels.
static int panels_of_task(int panels, int cuts, int threads) {
  int best = panels, least = ceil_div(cuts, threads) * (PACKING + panels);
  for (int parts = 2; parts <= panels; parts++) {
    const int run = ceil_div(panels, parts);
    const int takes = ceil_div(cuts * ceil_div(panels, run), threads) * (PACKING + run);
    if (takes < least) {
      least = takes;
      best = run;
    }
  }
  return best;
}

// Bytes of scratch a thread needs.
EXPORT size_t linear_scratch(int rows, int inputs) {
  return (size_t)rows_of_task(rows, inputs) * (64 * ceil_div(inputs, 32) + 4 * SIDE);
}

// weight (outputs, inputs), contiguous -> to, (panels, steps, 2) tiles, aligned to 64, zeros past its ends.
EXPORT void pack_weight(const bf16 *weight, int outputs, int inputs, bf16 *to, int threads) {
  const int steps = ceil_div(inputs, 32);
#pragma omp parallel for num_threads(threads)
  for (int panel = 0; panel < ceil_div(outputs, SIDE); panel++)
    for (int j = 0; j < 2 * steps; j++) {
      __m512i x[16];
      for (int i = 0; i < 16; i++) {
        const int output = panel * SIDE + j % 2 * 16 + i;
        x[i] = _mm512_maskz_loadu_epi16(output < outputs ? lanes(inputs - j / 2 * 32) : 0,
                                        weight + (size_t)output * inputs + j / 2 * 32);
      }
      transpose(x);
      bf16 *tile = to + ((size_t)panel * 2 * steps + j) * TILE;
      for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, x[i]);
    }
}

// activation: 0 or 1 for gelu_tanh. scratch: `each` bytes a thread, aligned to 64.
EXPORT void linear(const bf16 *x, int64_t x_row, int rows, int inputs, const bf16 *packed, int outputs,
                   const bf16 *bias, const bf16 *residual, int activation, bf16 *y, int threads, char *scratch,
                   size_t each) {
  const layer l = {x, packed, bias, residual, y, x_row, inputs, outputs};
  const int task_rows = rows_of_task(rows, inputs), cuts = ceil_div(rows, task_rows);
  const int panels = ceil_div(outputs, SIDE), run = panels_of_task(panels, cuts, threads), runs = ceil_div(panels, run);
#pragma omp parallel num_threads(threads)
  {
    const unsigned modes = begin_tiles();
    char *mine = scratch + each * omp_get_thread_num();
#pragma omp for schedule(dynamic)
    for (int t = 0; t < cuts * runs; t++) {
      const int first = t % cuts * task_rows, panel = t / cuts * run;
      multiply_rows(&l, first, rows - first < task_rows ? rows - first : task_rows, panel,
                    panel + run < panels ? panel + run : panels, mine, activation);
    }
    end_tiles(modes);
  }
}
