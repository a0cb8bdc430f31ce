// What is asked of the arrays that XLA hands over, before a kernel reads one of them: nothing here
// is trusted, neither a type, a rank, a size nor an option. It costs some comparisons for each
// axis.
//
// What stands in `start`, `stop` and the sizes of groups is not looked at here: the kernels cut it
// to the keys and rows that there are.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <string>

#include "calls.h"
#include "xla/ffi/api/ffi.h"

namespace flax_attn {

namespace ffi = xla::ffi;
using ffi::DataType;
using Sizes = ffi::Span<const int64_t>;

// The product of sizes, of which one that is 0 comes before all others.
inline int64_t count_of(Sizes sizes) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

// An array of a call.
struct Given {
  const char* name = "";
  DataType type = DataType::INVALID;
  Sizes sizes;
  void* memory = nullptr;

  bool empty() const { return count_of(sizes) == 0; }
  // The size of an axis counted from behind, the last being 1; 0 where there is none.
  int64_t behind(size_t axis) const {
    return axis <= sizes.size() ? sizes[sizes.size() - axis] : 0;
  }
  // The axes before the last `count` ones.
  Sizes before(size_t count) const { return sizes.first(std::max(sizes.size(), count) - count); }

  bool is(DataType wanted, Sizes leading, std::initializer_list<int64_t> trailing) const {
    if (type != wanted || sizes.size() != leading.size() + trailing.size()) return false;
    return std::equal(leading.begin(), leading.end(), sizes.begin()) &&
           std::equal(trailing.begin(), trailing.end(), sizes.begin() + leading.size());
  }
  bool is_number() const {
    return type == DataType::F32 || type == DataType::BF16 || type == DataType::F16;
  }
  Type number() const {
    if (type == DataType::BF16) return Type::bfloat16;
    return type == DataType::F16 ? Type::float16 : Type::float32;
  }
  template <typename T>
  T* data() const {
    return empty() ? nullptr : static_cast<T*>(memory);
  }
};

inline std::ostream& operator<<(std::ostream& to, const Given& x) {
  to << x.name << " " << x.type << "[";
  for (size_t i = 0; i < x.sizes.size(); ++i) to << (i ? "," : "") << x.sizes[i];
  return to << "]";
}

// The arrays of one call by their names, taken in the order in which XLA hands them over, and the
// first rule that is broken. Rules are asked in order: one may rest on those before.
class Border {
 public:
  Border(const char* call, ffi::RemainingArgs arguments, ffi::RemainingRets results)
      : call_(call), arguments_(arguments), results_(results) {}

  Given argument(const char* name) {
    const auto array = arguments_.get<ffi::AnyBuffer>(taken_++);
    return array.has_value() ? keep(name, *array) : Given{};
  }
  // An array that a call may have behind all others; without memory where it has none.
  Given optional(const char* name) { return taken_ < arguments_.size() ? argument(name) : Given{}; }
  Given result(const char* name) {
    auto array = results_.get<ffi::AnyBuffer>(made_++);
    return array.has_value() ? keep(name, **array) : Given{};
  }

  // Whether this rule holds, and all before; the first is that the call has the arrays that were
  // taken, and no others.
  bool require(bool holds, const char* rule) {
    const bool all = taken_ == arguments_.size() && made_ == results_.size();
    if (!broken_ && !all) broken_ = "a call of this name has other arrays";
    if (!broken_ && !holds) broken_ = rule;
    return !broken_;
  }

  ffi::Error error() const {
    if (!broken_) return ffi::Error::Success();
    std::ostringstream text;
    text << call_ << ": " << broken_ << "; got ";
    for (size_t i = 0; i < kept_; ++i) text << (i ? ", " : "") << arrays_[i];
    text << " (" << arguments_.size() << " arguments, " << results_.size() << " results)";
    return ffi::Error::InvalidArgument(text.str());
  }

 private:
  static constexpr size_t MOST = 20;  // arrays of a call

  Given keep(const char* name, const ffi::AnyBuffer& array) {
    const Given x{name, array.element_type(), array.dimensions(), array.untyped_data()};
    if (kept_ < MOST) arrays_[kept_++] = x;
    return x;
  }

  const char* call_;
  ffi::RemainingArgs arguments_;
  ffi::RemainingRets results_;
  size_t taken_ = 0, made_ = 0, kept_ = 0;
  const char* broken_ = nullptr;
  Given arrays_[MOST];
};

}  // namespace flax_attn
