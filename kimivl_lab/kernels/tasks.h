// What the attention kernels share: their function, which cuts the work into tasks for threads. A source defines SIDE,
// the queries of a block, before it includes this, and `attend`.
#pragma once

#include "common.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#define TASKS 4  // work is cut into about this many tasks a thread, or more

typedef struct {
  const void *data;
  ptrdiff_t row, head;  // strides in numbers
} operand;

typedef struct {
  operand q, k, v;
  void *out;  // (rows, heads, d), contiguous
  int heads, d;
  float scale;
  int bytes;  // of a number: 4 for float32, 2 for bfloat16
} problem;

typedef struct {
  int start, n, head;  // an image's first row and length
  int first, last;     // its queries
} task;

static int longest_first(const void *a, const void *b) { return ((const task *)b)->n - ((const task *)a)->n; }

// Every image and head is a task; where that gives too few or too uneven ones, its queries are cut, in multiples of
// `side`, and each piece packs the keys and values for itself. Returns how many.
static int cut_tasks(const int32_t *offsets, int images, int heads, int threads, int side, task *tasks) {
  double work = 0;
  for (int i = 0; i < images; i++) work += (double)heads * pow(offsets[i + 1] - offsets[i], 2);
  int count = 0;
  for (int i = 0; i < images; i++) {
    const int n = offsets[i + 1] - offsets[i];
    if (n <= 0) continue;
    const int pieces = (int)ceil((double)n * n * TASKS * threads / work);
    const int queries = ceil_div(ceil_div(n, pieces), side) * side;
    for (int head = 0; head < heads; head++)
      for (int first = 0; first < n; first += queries, count++)
        if (tasks) tasks[count] = (task){offsets[i], n, head, first, first + queries < n ? first + queries : n};
  }
  return count;
}

// Attention of one task's queries. scratch: of this thread, aligned to 64.
static void attend(const problem *p, const task *t, char *scratch);

// q, k, v (rows, heads, d) with strides (row, head) each, of numbers of `bytes`; offsets (images + 1,); scratch: `each`
// bytes a thread, aligned to 64. Rows of no image are not written. Returns 0, or -1 when there is no memory.
EXPORT int attention(const void *q, const void *k, const void *v, const int64_t *strides, void *out,
                     const int32_t *offsets, int images, int heads, int d, float scale, int bytes, int threads,
                     char *scratch, size_t each) {
  const problem p = {{q, strides[0], strides[1]}, {k, strides[2], strides[3]}, {v, strides[4], strides[5]}, out, heads,
                     d, scale, bytes};
  const int count = cut_tasks(offsets, images, heads, threads, SIDE, NULL);
  task *tasks = malloc(sizeof(task) * (count + 1));
  if (!tasks) return -1;
  cut_tasks(offsets, images, heads, threads, SIDE, tasks);
  qsort(tasks, count, sizeof(task), longest_first);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int i = 0; i < count; i++) attend(&p, tasks + i, scratch + each * omp_get_thread_num());
  free(tasks);
  return 0;
}
