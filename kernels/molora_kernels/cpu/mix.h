// What one token's adapters add to W x.
#pragma once
#include <algorithm>

#include "dots.h"
#include "mixture.h"

namespace molora {

constexpr int64_t BLOCK = 256;  // outputs at a time where their sums are kept beside

// What token t's adapters add to outputs first .. first + n. z: (J, widest), gate and scale folded in; plain: W x
// there. after: what is read afterwards.
template <class T>
void mix(const Adapters<T>& ad, int64_t t, const float* z, int64_t first, int64_t n, int64_t out, const float* plain,
         float* y, Ahead after = {}) {
  using Format = typename FormatOf<T>::Format;
  float part[BLOCK];
  for (int64_t j = 0; j < ad.top; j++) {
    int64_t choice = t * ad.top + j, slot = ad.slots[choice];
    if (slot == 0) continue;
    float gate = ad.gates[choice];
    const float* own = z + j * ad.widest;
    const T* up = ad.up(choice) + first;
    if (ad.out_scale) {
      const float* m = ad.out_scale + slot * out + first;
      for (int64_t b = 0; b < n; b += BLOCK) {
        int64_t some = std::min(BLOCK, n - b);
        std::fill(part, part + some, 0.f);
        expand<Format>(up + b, ad.ldb, own, ad.rank(choice), some, part);
        for (int64_t o = 0; o < some; o++) y[b + o] += m[b + o] * part[o] + gate * (m[b + o] - 1.f) * plain[b + o];
      }
    } else {
      bool more = j + 1 < ad.top && ad.rank(choice + 1) > 0;
      expand<Format>(up, ad.ldb, own, ad.rank(choice), n, y, more ? Ahead(ad.up(choice + 1) + first, ad.ldb, n) : after);
    }
    if (ad.out_bias) {
      const float* b = ad.out_bias + slot * out + first;
      for (int64_t o = 0; o < n; o++) y[o] += gate * b[o];
    }
  }
}

}  // namespace molora
