// Validation of everything a caller passes in. Each function returns 0, or -1 after recording what is wrong.
#pragma once
#include <stddef.h>

#include "aquiline.h"

namespace aq {

bool has_dot();      // whether this CPU and build have the dot product of dot.cpp
int fastest_bf16();  // the code of the format in which bfloat16 weights are multiplied fastest
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* last_error();

int check_pointer(const char* name, const void* pointer, size_t alignment);
int check_parts(const char* name, const AqLinear& linear, int n, int k);  // n: of all parts
int check_linear(const char* name, const AqLinear& linear, int n, int k);  // n, k: expected, 0 for any
int check_model(const AqModel* model);
int check_kv(const AqKV* kv, int num_kv_heads, int head_dim);  // 0 for any
int check_rows(const AqRows* rows, const AqKV& kv, int vocab, bool reads);
int check_sampling(const AqSampling* sampling, int n);
int check_index(const char* name, int row, int index, const AqKV& kv, const int32_t* table, int table_stride);

}  // namespace aq

#define AQ_REQUIRE(condition, ...)                    \
  do {                                                \
    if (!(condition)) return ::aq::fail(__VA_ARGS__); \
  } while (0)
#define AQ_TRY(call)            \
  do {                          \
    if ((call) != 0) return -1; \
  } while (0)
