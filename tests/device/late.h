// What of the device's work is late. Kernels run at once; the host sees what they made only through copies, and these
// are late where the host does not wait for them:
// - to the host: what the device has now is kept aside, the destination is poisoned, and gets it when the host waits;
// - from pinned memory: the host must leave the source as it is until it has waited. If not, its wait fails.
// All streams are one queue, in the order of the calls.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include "aliases.h"

class Late {
 public:
  void copy_to_host(const at::Tensor& on_device, const at::Tensor& host) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    finish_of(host);
    auto values = at::empty(host.sizes(), host.options().pinned_memory(false));
    auto poison = at::empty_like(values);
    values.copy_(alias_of(on_device));
    memset(poison.mutable_data_ptr(), 0xFF, poison.nbytes());
    host.copy_(poison);
    waiting_.push_back({++num_, host, values, true});
  }

  void copy_from_pinned(const at::Tensor& host, const at::Tensor& on_device) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    finish_of(host);
    alias_of(on_device).copy_(host);
    waiting_.push_back({++num_, host, contiguous_copy(host), false});
  }

  uint64_t num() const { return num_; }
  bool is_done(uint64_t number) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return waiting_.empty() || waiting_.front().number > number;
  }

  void finish(uint64_t last = std::numeric_limits<uint64_t>::max()) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    while (!waiting_.empty() && waiting_.front().number <= last) {
      auto first = waiting_.front();
      waiting_.pop_front();
      run(first);
    }
  }

 private:
  struct Copy {
    uint64_t number;
    at::Tensor host, values;
    bool to_host;
  };

  static at::Tensor contiguous_copy(const at::Tensor& host) {
    return at::empty(host.sizes(), host.options().pinned_memory(false)).copy_(host);
  }
  static void run(const Copy& copy) {
    at::AutoDispatchBelowADInplaceOrView guard;
    if (copy.to_host) {
      copy.host.copy_(copy.values);
      return;
    }
    auto now = contiguous_copy(copy.host);
    TORCH_CHECK(
        !memcmp(now.const_data_ptr(), copy.values.const_data_ptr(), now.nbytes()),
        "pinned memory of shape ", now.sizes(), " was written to while a copy from it to the device was under way");
  }
  // A stream runs copies of one buffer one after the other.
  void finish_of(const at::Tensor& host) {
    std::deque<Copy> others;
    std::swap(others, waiting_);
    for (auto& copy : others)
      if (copy.host.storage().is_alias_of(host.storage())) run(copy);
      else waiting_.push_back(copy);
  }

  std::recursive_mutex mutex_;
  std::deque<Copy> waiting_;
  uint64_t num_ = 0;
};

inline Late& late() {
  static Late* made = new Late();
  return *made;
}

// Called with ("wait" or "send", what) where the host waits, and where it sends a tensor; None: nobody listens.
inline py::object& listener() {
  static auto* made = new py::object(py::none());
  return *made;
}

inline void tell(const char* kind, const char* what) {
  py::gil_scoped_acquire gil;
  if (!listener().is_none()) listener()(kind, what);
}

inline void host_waits(const char* what, uint64_t last = std::numeric_limits<uint64_t>::max()) {
  tell("wait", what);
  late().finish(last);
}
