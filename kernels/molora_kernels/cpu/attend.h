// One token's attention over keys and values that stay where they are.
#pragma once
#include <cstdint>

namespace molora {

// A layer's keys or values: head h, position p begins at data + h * head + p * row.
template <class T>
struct Kept {
  const T* data;
  int64_t head, row, width;
};

// out (heads, V.width) = softmax(scale q K^T) V of queries q (heads, K.width) over positions 0 .. length - 1. Query
// heads h * shared .. + shared read key head h (grouped-query attention). Sums are fp32.
template <class T>
void attend(const T* q, int64_t heads, int64_t shared, const Kept<T>& K, const Kept<T>& V, int64_t length, float scale,
            T* out, int64_t max_threads);

}  // namespace molora
