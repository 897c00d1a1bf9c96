// Schemas of the ops. The file of each op registers its implementation.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(nlgrpo, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor x) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("other_avx512() -> bool");
  m.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def(
      "branch_attention(Tensor qkv, Tensor? cos, Tensor? sin, Tensor(a!) own, int column, Tensor prompts, "
      "Tensor lengths, Tensor prompt, int window, float scale, int heads) -> Tensor");
  m.def(
      "decode_block(Tensor x, Tensor norm1, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor norm2, "
      "Tensor up, Tensor down, float eps, Tensor? cos, Tensor? sin, Tensor(a!) own, int column, Tensor prompts, "
      "Tensor lengths, Tensor prompt, int window, float scale, int heads) -> Tensor");
  m.def(
      "packed_attention(Tensor qkv, Tensor? cos, Tensor? sin, Tensor segments, int window, float scale, int heads) -> "
      "(Tensor, Tensor)");
  m.def(
      "packed_attention_backward(Tensor grad, Tensor qkv, Tensor? cos, Tensor? sin, Tensor out, Tensor lse, "
      "Tensor segments, int window, float scale, int heads) -> Tensor");
  m.def("logits_statistics(Tensor logits, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)");
  m.def(
      "logits_gradient(Tensor logits, Tensor targets, Tensor kept, Tensor entropy, Tensor grad_logprob, "
      "Tensor? grad_entropy, float temperature, Tensor(a!) out) -> ()");
  m.def("sample_tokens(Tensor logits, Tensor noise, float temperature) -> (Tensor, Tensor)");
  m.def("ecdf_first_nan(Tensor x) -> int");
  m.def("ecdf_ranks(Tensor samples, Tensor? offsets, Tensor? weights, int side, bool double_result) -> Tensor");
  m.def("ecdf_argsort(Tensor samples, Tensor? offsets) -> Tensor");
  m.def(
      "ecdf_evaluate(Tensor ordered, Tensor? offsets, Tensor queries, Tensor? query_offsets, Tensor? cumulative, "
      "int side, bool double_result) -> Tensor");
  m.def(
      "ecdf_merge(Tensor a, Tensor? a_offsets, Tensor b, Tensor? b_offsets, Tensor? a_weights, Tensor? b_weights) -> "
      "(Tensor, Tensor)");
  m.def("linearize_rows(Tensor rewards, Tensor weights) -> Tensor");
}
