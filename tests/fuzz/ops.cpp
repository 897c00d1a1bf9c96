// A libFuzzer target for the compiled ops: it calls an op of csrc/library.cpp, named by NLGRPO_FUZZ_OP, by its schema. An op
// may refuse its arguments by an error. Every other end of the call is a fault, and so are a result that breaks what is
// known of it, and an argument that is changed without the schema saying so.
#include "arguments.h"
#include "results.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>

namespace fuzz {
namespace {

c10::IValue anything(Draw& d, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return d.anything();
    case c10::TypeKind::OptionalType:
      return d.rarely(2) ? anything(d, *type.castRaw<c10::OptionalType>()->getElementType()) : c10::IValue();
    case c10::TypeKind::IntType:
      return d.integer();
    case c10::TypeKind::FloatType:
      return d.real();
    case c10::TypeKind::BoolType:
      return d.rarely(2);
    default:
      fault("no argument of the type " + type.str() + " can be drawn; add it to tests/fuzz/ops.cpp");
  }
}

// An argument that may not fit the others: with another integer in it, one size more or less, of another dtype or layout, or
// any other.
c10::IValue deviating(Draw& d, const c10::IValue& from, const c10::Type& type) {
  if (!from.isTensor()) {
    return anything(d, type);
  }
  const at::Tensor& x = from.toTensor();
  if (x.scalar_type() == at::kLong && x.numel() > 0 && d.rarely(2)) {
    int64_t offset = 0;
    for (int64_t dim = 0; dim < x.dim(); dim++) {
      offset += d.within(0, x.size(dim) - 1) * x.stride(dim);
    }
    x.mutable_data_ptr<int64_t>()[offset] = d.integer();
    d.remember(x);
    return x;
  }
  std::vector<int64_t> sizes = x.sizes().vec();
  switch (d.within(0, 4)) {
    case 0:
      return anything(d, type);
    case 1:
      return d.tensor(sizes, d.among(std::array{at::kFloat, at::kDouble, at::kLong, at::kInt, at::kHalf}));
    case 2:
      return d.tensor(sizes, x.scalar_type());
    case 3:
      sizes.insert(sizes.begin(), 1);
      return d.tensor(sizes, x.scalar_type());
    default:
      if (!sizes.empty()) {
        int64_t& size = sizes[d.within(0, sizes.size() - 1)];
        size = std::max<int64_t>(0, size + d.among(std::array<int64_t, 4>{1, -1, 2, -size}));
      }
      return d.tensor(sizes, x.scalar_type());
  }
}

// Mostly arguments that fit together; sometimes one of them is another, sometimes all.
Arguments draw(Draw& d, const c10::FunctionSchema& schema) {
  const auto fitting = arguments().find(schema.name().substr(std::strlen("nlgrpo::")));
  const int64_t mode = d.within(0, 31);
  Arguments all;
  if (mode == 31 || fitting == arguments().end()) {
    for (const c10::Argument& argument : schema.arguments()) {
      all.push_back(anything(d, *argument.real_type()));
    }
    return all;
  }
  all = fitting->second(d);
  if (mode >= 27) {
    const auto i = static_cast<size_t>(d.within(0, all.size() - 1));
    all[i] = deviating(d, all[i], *schema.arguments()[i].real_type());
  }
  return all;
}

// Memory that the schema lets the op write.
std::set<const void*> written(const c10::FunctionSchema& schema, const Arguments& given) {
  std::set<const void*> memory;
  for (size_t i = 0; i < given.size(); i++) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && given[i].isTensor()) {
      memory.insert(given[i].toTensor().storage().data());
    }
  }
  return memory;
}

c10::OperatorHandle op_to_call() {
  const char* name = std::getenv("NLGRPO_FUZZ_OP");
  const auto found = c10::Dispatcher::singleton().findSchema({"nlgrpo::" + std::string(name ? name : ""), ""});
  if (!found) {
    fault("set NLGRPO_FUZZ_OP to the name of an op in csrc/library.cpp");
  }
  return *found;
}

// Printed when the process ends without a fault.
struct Counts {
  int64_t cases = 0, refused = 0;
  ~Counts() {
    std::fprintf(stderr, "cases: %lld, refused: %lld\n", static_cast<long long>(cases), static_cast<long long>(refused));
  }
};

// Call the op, whose results replace its arguments on the stack. Returns false if it refuses them. Refusals of the ops are
// runtime errors, those of torch c10::Error; others, such as std::bad_alloc, are faults.
bool computes(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  try {
    op.callBoxed(stack);
    return true;
  } catch (const std::exception& error) {
    const bool refusal = dynamic_cast<const c10::Error*>(&error) || typeid(error) == typeid(std::runtime_error);
    if (!refusal || std::strstr(error.what(), "INTERNAL ASSERT")) {
      fault(error.what());
    }
    return false;
  }
}

void run(const uint8_t* data, size_t size) {
  static const c10::OperatorHandle op = op_to_call();
  static Counts counts;
  Draw d(data, size);
  if (const int threads = d.rarely(4) ? 3 : 1; threads != at::get_num_threads()) {
    at::set_num_threads(threads);
  }
  const Arguments given = draw(d, op.schema());
  const std::set<const void*> may_change = written(op.schema(), given);
  torch::jit::Stack stack = given;
  counts.cases++;
  if (computes(op, stack)) {
    check_results(op.schema().name(), given, stack);
  } else {
    counts.refused++;
  }
  for (const Block& block : d.blocks()) {
    if (!may_change.contains(block.at) && block.changed()) {
      fault("an argument was changed that the schema does not mark as written");
    }
  }
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const c10::InferenceMode guard;
  fuzz::run(data, size);
  return 0;
}
