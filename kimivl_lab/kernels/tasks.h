// How the attention kernels cut their work into tasks for threads.
#pragma once

#include "common.h"

#include <math.h>
#include <stdlib.h>

#define TASKS 4  // work is cut into about this many tasks a thread, or more

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

// All tasks, the longest first, for the caller to free; NULL when there is no memory.
static task *list_tasks(const int32_t *offsets, int images, int heads, int threads, int side, int *count) {
  *count = cut_tasks(offsets, images, heads, threads, side, NULL);
  task *tasks = malloc(sizeof(task) * (*count + 1));
  if (!tasks) return NULL;
  cut_tasks(offsets, images, heads, threads, side, tasks);
  qsort(tasks, *count, sizeof(task), longest_first);
  return tasks;
}
