// Makes the calls of a recorded file (recorder.py says how it is laid out) with every instruction set of this machine,
// the best on two threads too, and compares all memory that a call reaches with what the recording machine had, to the
// bit.
//
//   replay FILE     prints a line per instruction set and thread count; exits with 1 at the first difference
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api/aquiline.h"
#include "lookup/lookup.h"
#include "stages/stages.h"

namespace {

enum Record : uint32_t { kEnd, kRegion, kBytes, kPointer, kFree, kLabel, kCall };

[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  exit(1);
}

// The file, read from front to back.
class Reader {
 public:
  explicit Reader(const std::vector<char>& bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

  const char* take(uint64_t size) {
    if (size > (uint64_t)(end_ - at_)) fail("the file ends early");
    at_ += size;
    return at_ - size;
  }
  template <class T>
  T number() {
    T value;
    memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<uint64_t>();
    return std::string(take(size), size);
  }

 private:
  const char *at_, *end_;
};

// Memory that calls share, and what it should hold.
struct Region {
  char* actual;
  std::vector<char> expected;
};

// One argument: its bits as a number, or as an address.
using Argument = uint64_t;

template <class T>
T as(Argument argument) {
  if constexpr (std::is_pointer_v<T>) return (T)(uintptr_t)argument;
  T value;
  memcpy(&value, &argument, sizeof value);
  return value;
}

template <class R, class... A, size_t... I>
uint64_t apply(R (*function)(A...), const std::vector<Argument>& given, std::index_sequence<I...>) {
  if (given.size() != sizeof...(A)) fail("a call has another number of arguments");
  return (uint64_t)function(as<A>(given[I])...);
}

template <class R, class... A>
uint64_t call(R (*function)(A...), const std::vector<Argument>& given) {
  return apply(function, given, std::index_sequence_for<A...>());
}

using Function = uint64_t (*)(const std::vector<Argument>&);
#define AQ_FUNCTION(name) {#name, [](const std::vector<Argument>& given) { return call(&name, given); }}
const std::map<std::string, Function> kFunctions = {
    AQ_FUNCTION(aq_pack),        AQ_FUNCTION(aq_forward),       AQ_FUNCTION(aq_head_logits),  AQ_FUNCTION(aq_head_draw),
    AQ_FUNCTION(aq_head_guess),  AQ_FUNCTION(aq_head_topk),     AQ_FUNCTION(aq_draw),         AQ_FUNCTION(aq_linear),
    AQ_FUNCTION(aq_rms_norm),    AQ_FUNCTION(aq_swiglu),        AQ_FUNCTION(aq_rope),         AQ_FUNCTION(aq_write_kv),
    AQ_FUNCTION(aq_attention),   AQ_FUNCTION(aq_exp_log),       AQ_FUNCTION(aq_gumbel),       AQ_FUNCTION(aq_fuse),
    AQ_FUNCTION(aq_move_kv),     AQ_FUNCTION(aq_open_batch),    AQ_FUNCTION(aq_add_shape),    AQ_FUNCTION(aq_draft),
    AQ_FUNCTION(aq_verify),      AQ_FUNCTION(aq_head_logprobs), AQ_FUNCTION(aq_keep),         AQ_FUNCTION(aq_step),
    AQ_FUNCTION(aq_close_batch), AQ_FUNCTION(aq_open_index),    AQ_FUNCTION(aq_extend_index), AQ_FUNCTION(aq_propose),
    AQ_FUNCTION(aq_close_index),
};

class Replay {
 public:
  explicit Replay(const std::vector<char>& file) : reader_(file) {}

  // Returns the number of calls made.
  int run() {
    if (memcmp(reader_.take(8), "AQTRACE1", 8) != 0) fail("this is no recorded file");
    if (reader_.number<uint32_t>() != AQ_ABI) fail("the file was recorded with another interface: record it again");
    for (;;) {
      switch (reader_.number<uint32_t>()) {
        case kEnd: return calls_;
        case kRegion: add(); break;
        case kBytes: {
          Region& region = at(reader_.number<uint32_t>());
          const auto offset = change(region);
          memcpy(region.actual + offset.first, region.expected.data() + offset.first, offset.second);
          break;
        }
        case kPointer: point(); break;
        case kFree: {
          const auto number = reader_.number<uint32_t>();
          free(at(number).actual);
          regions_.erase(number);
          break;
        }
        case kLabel: label_ = reader_.text(); break;
        case kCall: make_call(); break;
        default: fail("the file has a record of no known kind");
      }
    }
  }

 private:
  Region& at(uint32_t number) {
    const auto found = regions_.find(number);
    if (found == regions_.end()) fail("the file names a region that does not exist");
    return found->second;
  }

  void add() {
    const auto number = reader_.number<uint32_t>();
    const auto size = reader_.number<uint64_t>();
    Region region{nullptr, std::vector<char>(size)};
    region.actual = (char*)aligned_alloc(64, (size + 63) / 64 * 64);
    if (region.actual == nullptr) fail("out of memory");
    memset(region.actual, 0, size);
    regions_[number] = std::move(region);
  }

  // Reads offset, size and bytes into what a region should hold; returns offset and size.
  std::pair<uint64_t, uint64_t> change(Region& region) {
    const auto offset = reader_.number<uint64_t>(), size = reader_.number<uint64_t>();
    if (offset + size > region.expected.size()) fail("a change lies outside its region");
    memcpy(region.expected.data() + offset, reader_.take(size), size);
    return {offset, size};
  }

  void point() {
    char* from = at(reader_.number<uint32_t>()).actual + reader_.number<uint64_t>();
    const char* to = at(reader_.number<uint32_t>()).actual;
    to += reader_.number<uint64_t>();
    memcpy(from, &to, sizeof to);
  }

  Argument argument() {
    const auto number = reader_.number<uint32_t>();
    const auto value = reader_.number<uint64_t>();
    const auto handle = handles_.find(number);
    if (handle != handles_.end()) return handle->second;
    return number == 0 ? value : (Argument)(uintptr_t)(at(number).actual + value);
  }

  void make_call() {
    const std::string name = reader_.text();
    const auto function = kFunctions.find(name);
    if (function == kFunctions.end()) fail("the file calls " + name + ", which replay.cpp does not know");
    const auto count = reader_.number<uint32_t>(), handle = reader_.number<uint32_t>();
    std::vector<Argument> given(count);
    for (Argument& one : given) one = argument();
    const uint64_t result = function->second(given);
    calls_++;
    where_ = label_ + ", call " + std::to_string(calls_) + ", " + name;
    if (handle != 0) handles_[handle] = result;
    if ((handle != 0) != (result != 0)) fail(where_ + ": " + aq_last_error());
    for (auto changes = reader_.number<uint32_t>(); changes > 0; changes--) change(at(reader_.number<uint32_t>()));
    for (auto compared = reader_.number<uint32_t>(); compared > 0; compared--) compare(at(reader_.number<uint32_t>()));
  }

  void compare(const Region& region) const {
    const size_t size = region.expected.size();
    if (memcmp(region.actual, region.expected.data(), size) == 0) return;
    size_t i = 0;
    while (region.actual[i] == region.expected[i]) i++;
    i = i / 4 * 4;
    uint32_t actual = 0, expected = 0;
    const size_t width = size - i < 4 ? size - i : 4;
    memcpy(&actual, region.actual + i, width), memcpy(&expected, region.expected.data() + i, width);
    char words[96];
    snprintf(words, sizeof words, ": byte %zu of %zu: %08x, must be %08x", i, size, actual, expected);
    fail(where_ + words);
  }

  Reader reader_;
  std::map<uint32_t, Region> regions_;
  std::map<uint32_t, Argument> handles_;
  std::string label_, where_;
  int calls_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("usage: replay FILE");
  FILE* file = fopen(arguments[1], "rb");
  if (file == nullptr) fail(std::string(arguments[1]) + ": cannot be opened");
  std::vector<char> bytes;
  char part[1 << 16];
  for (size_t n; (n = fread(part, 1, sizeof part, file)) > 0;) bytes.insert(bytes.end(), part, part + n);
  fclose(file);
  std::stringstream names(aq_available_isas());
  int most = 2;  // threads
  for (std::string isa; std::getline(names, isa, ','); most = 1)
    for (int threads = most; threads > 0; threads--) {
      if (aq_select_isa(isa.c_str()) != 0 || aq_set_threads(threads) != 0) fail(aq_last_error());
      printf("%s %d %d\n", isa.c_str(), threads, Replay(bytes).run());
    }
}
