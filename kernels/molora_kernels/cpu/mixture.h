// The mixture of one module: y = W x + bias + sum_j g_j (f_j(x) - W x - bias), f_j the module with adapter j alone.
#pragma once
#include <cstdint>

namespace molora {

// The adapters of a module and the routes of N tokens. Slot s owns rows extent[s][0] .. + extent[s][1] of A and B.
template <class T>
struct Adapters {
  const T* A;  // rows of `in`
  int64_t lda;
  const T* B;  // rows of `out`: B transposed
  int64_t ldb;
  const int64_t* extent;  // (S, 2) first row, number of rows
  const float* scale;     // (S,)
  const int64_t* slots;   // (N, J), 0 = none
  const float* gates;     // (N, J)
  int64_t top;            // J
  int64_t widest;         // largest number of rows of a slot
  const float* out_scale;  // (S, out) or null
  const float* out_bias;   // (S, out) or null

  int64_t rank(int64_t choice) const { return slots[choice] == 0 ? 0 : extent[2 * slots[choice] + 1]; }
  const T* down(int64_t choice) const { return A + extent[2 * slots[choice]] * lda; }
  const T* up(int64_t choice) const { return B + extent[2 * slots[choice]] * ldb; }
};

// y (N, out) of few tokens x (N, in): W is streamed once, the adapters' part added to a block of outputs before it is
// stored. ld*: strides of rows in elements. row_scale: (out,) for int8 weights or null. ad: null = no adapters.
template <class T, class Weight>
void decode(const Weight* W, int64_t ldw, const float* row_scale, const T* bias, const T* x, int64_t ldx, int64_t N,
            int64_t in, int64_t out, const Adapters<T>* ad, T* y, int64_t max_threads);

// y (N, out) += what the adapters add to W x + bias, which y holds. base_bias: (out,) or null, used beside out_scale.
template <class T, class Y>
void add_delta(const Adapters<T>& ad, const T* base_bias, const T* x, int64_t ldx, int64_t N, int64_t in, int64_t out,
               Y* y, int64_t max_threads);

}  // namespace molora
