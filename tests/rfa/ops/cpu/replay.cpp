// Runs recorded calls of the kernels: `replay CALLS RESULTS [REPEATS]`.
//
// It knows no structure of the kernels. A call is its entry point's number, the bytes of its structure, the offsets of
// the pointers in it, and the memory that they point into; in the file each pointer is an offset into that memory. The
// results are the memories after the calls. With REPEATS it prints the shortest time of each call.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int rfa_forward(const void*);
int rfa_backward(const void*);
int rfa_phases(const void*);
int rfa_decode(const void*);
int rfa_enter(const void*);
int rfa_token(const void*);
}

int main(int count, char** arguments) {
  int (*const entries[])(const void*) = {rfa_forward, rfa_backward, rfa_phases, rfa_decode, rfa_enter, rfa_token};
  std::FILE *calls = std::fopen(arguments[1], "rb"), *results = std::fopen(arguments[2], "wb");
  const int repeats = count > 3 ? std::atoi(arguments[3]) : 0;
  int64_t header[4];  // entry, bytes of the structure, pointers, bytes of the memory
  while (std::fread(header, sizeof header, 1, calls)) {
    std::vector<int64_t> problem(header[1] / 8), pointers(header[2]);
    char* memory = static_cast<char*>(std::aligned_alloc(64, (header[3] + 127) / 64 * 64));
    if (std::fread(problem.data(), 8, problem.size(), calls) != problem.size()) return 2;
    if (std::fread(pointers.data(), 8, pointers.size(), calls) != pointers.size()) return 2;
    if (std::fread(memory, 1, header[3], calls) != static_cast<size_t>(header[3])) return 2;
    for (const int64_t at : pointers) problem[at / 8] += reinterpret_cast<int64_t>(memory);
    const std::vector<char> before(memory, memory + header[3]);
    double least = 1e9;
    for (int i = 0; i < repeats; i++) {  // gradients are added to what is there
      const auto begun = std::chrono::steady_clock::now();
      entries[header[0]](problem.data());
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
      least = seconds < least ? seconds : least;
    }
    if (repeats) std::printf("%lld %.6f ms\n", static_cast<long long>(header[0]), 1e3 * least);
    std::memcpy(memory, before.data(), before.size());
    if (entries[header[0]](problem.data())) return 3;
    if (std::fwrite(memory, 1, header[3], results) != static_cast<size_t>(header[3])) return 2;
    std::free(memory);
  }
  return 0;
}
