// Faults that the sanitizers must detect, in functions like those of the ops. Called by planted_faults.py.
#include "simd.h"

#include <vector>

namespace nlgrpo {

NLGRPO_CLONES float add_up(const float* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) {
    sum += x[i];
  }
  return sum;
}

NLGRPO_CLONES void double_all(float* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    x[i] *= 2;
  }
}

}  // namespace nlgrpo

// x points at the 1001 ones of a tensor.
#define FAULT(name) extern "C" __attribute__((visibility("default"))) int64_t name([[maybe_unused]] float* x, int64_t n)

FAULT(reads) {
  return static_cast<int64_t>(nlgrpo::add_up(x, n));
}

FAULT(writes) {
  nlgrpo::double_all(x, n);
  return static_cast<int64_t>(x[0]);
}

FAULT(reads_the_room_of_a_vector) {
  std::vector<int64_t> scratch(1001, 3);
  scratch.reserve(2002);
  return scratch[static_cast<size_t>(n - 1)];
}

FAULT(multiplies) {
  return (int64_t{1} << 61) * n;
}

FAULT(shifts) {
  return int64_t{1} << n;
}
