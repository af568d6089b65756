// Memory of the device: one memfd, mapped twice. `data_ptr` of a tensor points into a mapping without access, so that
// the host faults where it touches it; kernels run through the other one.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 8;
constexpr size_t kCapacity = size_t(16) << 30;  // of all devices together
constexpr size_t kPoisoned = size_t(64) << 20;  // what is larger is left as it comes
inline thread_local c10::DeviceIndex current_device = 0;

class Arena {
 public:
  Arena() {
    fd_ = memfd_create("simulated", 0);
    TORCH_CHECK(fd_ >= 0 && ftruncate(fd_, kCapacity) == 0, "no memory for the simulated device");
    constexpr int flags = MAP_SHARED | MAP_NORESERVE;
    for_kernels_ = static_cast<char*>(mmap(nullptr, kCapacity, PROT_READ | PROT_WRITE, flags, fd_, 0));
    for_tensors_ = static_cast<char*>(mmap(nullptr, kCapacity, PROT_NONE, flags, fd_, 0));
    TORCH_CHECK(for_kernels_ != MAP_FAILED && for_tensors_ != MAP_FAILED, "no memory for the simulated device");
    free_[0] = kCapacity;
  }

  void* take(size_t num_bytes) {
    if (!num_bytes) return nullptr;
    num_bytes = (num_bytes + 511) & ~size_t(511);
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = std::find_if(free_.begin(), free_.end(), [&](auto& range) { return range.second >= num_bytes; });
    TORCH_CHECK_WITH(OutOfMemoryError, found != free_.end(), "simulated device out of memory");
    auto [start, size] = *found;
    free_.erase(found);
    if (size > num_bytes) free_[start + num_bytes] = size - num_bytes;
    taken_[start] = num_bytes;
    in_use_ += num_bytes;
    peak_ = std::max(peak_, in_use_);
    if (num_bytes <= kPoisoned) memset(for_kernels_ + start, 0xFF, num_bytes);  // NaN, True, -1
    return for_tensors_ + start;
  }

  void give_back(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(static_cast<char*>(pointer) - for_tensors_);
    auto [start, size] = *found;
    taken_.erase(found);
    in_use_ -= size;
    if (size >= (1 << 20)) fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, size);
    auto next = free_.lower_bound(start);
    if (next != free_.end() && next->first == start + size) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == start)
      std::prev(next)->second += size;
    else
      free_[start] = size;
  }

  char* for_kernels(const void* pointer) const {
    return pointer ? static_cast<const char*>(pointer) - for_tensors_ + for_kernels_ : nullptr;
  }
  bool is_for_kernels(const void* pointer) const { return pointer >= for_kernels_ && pointer < for_kernels_ + kCapacity; }
  size_t in_use() const { return in_use_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = in_use_; }

 private:
  int fd_;
  char *for_kernels_, *for_tensors_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_, taken_;  // start -> size
  size_t in_use_ = 0, peak_ = 0;
};

inline Arena& arena() {
  static Arena* made = new Arena();
  return *made;
}

struct DeviceAllocator final : c10::Allocator {
  static void give_back(void* pointer) { arena().give_back(pointer); }
  c10::DataPtr allocate(size_t num_bytes) override {
    void* pointer = arena().take(num_bytes);
    return {pointer, pointer, &give_back, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    memcpy(arena().for_kernels(to), arena().for_kernels(from), num_bytes);
  }
};
inline DeviceAllocator device_allocator;

// Memory of the host that copies may use while the host goes on.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* pointer = nullptr;
    TORCH_CHECK(!posix_memalign(&pointer, 64, std::max<size_t>(num_bytes, 64)), "no memory to pin");
    std::lock_guard<std::mutex> lock(mutex());
    ranges()[static_cast<char*>(pointer)] = std::max<size_t>(num_bytes, 64);
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }

  static bool has(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = ranges().upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    return after != ranges().begin() && pointer < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static void free_pinned(void* pointer) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      ranges().erase(static_cast<char*>(pointer));
    }
    free(pointer);
  }
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }
  static std::map<char*, size_t>& ranges() {
    static auto* made = new std::map<char*, size_t>;
    return *made;
  }
};
inline PinnedAllocator pinned_allocator;
