// Working memory of one task, taken from a stock that each thread keeps for its tasks.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace rfa {

// New memory for every task would cost a page fault every 4 kB.
class Stock {
 public:
  ~Stock() { release(0); }

  char* take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    while (at_ < chunks_.size() && used_ + bytes > chunks_[at_].size) at_++, used_ = 0;
    if (at_ == chunks_.size()) {
      const size_t size = bytes > LEAST ? bytes : LEAST;
      char* data = static_cast<char*>(std::aligned_alloc(64, size));
      if (!data) throw std::bad_alloc();
      chunks_.push_back({data, size});
    }
    char* taken = chunks_[at_].data + used_;
    used_ += bytes;
    return taken;
  }

  // Frees all buffers. A thread keeps at most MOST bytes.
  void clear() {
    at_ = used_ = 0;
    size_t kept = 0, total = 0;
    for (; kept < chunks_.size() && total + chunks_[kept].size <= MOST; kept++) total += chunks_[kept].size;
    release(kept);
  }

 private:
  static constexpr size_t LEAST = size_t{1} << 20, MOST = size_t{1} << 26;
  struct Chunk {
    char* data;
    size_t size;
  };
  void release(size_t first) {
    for (size_t i = first; i < chunks_.size(); i++) std::free(chunks_[i].data);
    chunks_.resize(first);
  }
  std::vector<Chunk> chunks_;
  size_t at_ = 0, used_ = 0;
};

// `inline` without `static`, so that all sources share one. The linker keeps one copy of Buffer's constructor: of several
// stocks that copy would take from one, and its caller would clear another.
inline Stock& stock() {
  static thread_local Stock of_this_thread;
  return of_this_thread;
}

// In whole cache lines, with some room at the end for vectors that read beyond it. It is zeroed, but for its first
// `written` entries, which the caller writes. It is valid until `stock().clear()`.
template <class T> class Buffer {
 public:
  explicit Buffer(int64_t size, int64_t written = 0) {
    data_ = reinterpret_cast<T*>(stock().take((size + 64) * sizeof(T)));
    std::memset(static_cast<void*>(data_ + written), 0, (size + 64 - written) * sizeof(T));
  }
  operator T*() const { return data_; }

 private:
  T* data_;
};

}  // namespace rfa
