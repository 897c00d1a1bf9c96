// The schemas of the ops; each op's file registers what computes it.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(nlgrpo, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("swiglu(Tensor x) -> Tensor");
  m.def(
      "decode_attention(Tensor qkv, Tensor? cos, Tensor? sin, Tensor(a!) cache, int column, Tensor? first, "
      "int window, float scale, int heads) -> Tensor");
}
