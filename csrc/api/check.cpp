#include "check.h"

#include <stdarg.h>
#include <stdio.h>

#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "formats/formats.h"
#include "kernels/kernels.h"

namespace aq {
namespace {

thread_local char message[256] = "";

// __builtin_cpu_supports knows whether the operating system keeps 512-bit registers, but not AVX512_BF16 in every
// compiler.
bool detect_dot() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  __builtin_cpu_init();
  return kHasDot && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5)) != 0;
#else
  return false;
#endif
}

// The codes and names of the formats that is_wanted(format) holds for.
template <class F>
std::string codes_of(const F& is_wanted) {
  std::string codes;
  for (int code = 0; code < host::kMaxFormats; code++)
    host::with_format(code, [&](auto format) {
      if (is_wanted(format)) codes += (codes.empty() ? "" : ", ") + std::to_string(code) + " (" + format.kName + ")";
    });
  return codes;
}

int check_element(const char* name, int dtype, const void* pointer) {
  size_t size = 0;
  host::with_elements(dtype, [&](auto* element) { size = sizeof *element; });
  host::with_blocks(dtype, [&](auto format) { size = format.kAlignment; });
  const auto is_wanted = [](auto format) {
    return format.kIsUnpacked || !host::kIsSame<typename decltype(format)::Element, void>;
  };
  AQ_REQUIRE(size > 0, "%s_dtype=%d: must be one of %s", name, dtype, codes_of(is_wanted).c_str());
  return check_pointer(name, pointer, size);
}

int check_floats(const char* name, const float* pointer) { return check_pointer(name, pointer, sizeof(float)); }

int check_optional(const char* name, const float* pointer) {
  return pointer == nullptr ? 0 : check_floats(name, pointer);
}

int check_attention(const AqModel& m, const AqAttention& attention) {
  const int heads = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim;
  AQ_TRY(check_parts("qkv", attention.qkv, heads, m.is_draft ? 2 * m.hidden : m.hidden));
  AQ_TRY(check_linear("o", attention.o, m.hidden, m.num_heads * m.head_dim));
  AQ_REQUIRE(!m.is_draft || m.hidden % 32 == 0 || !host::takes_codes(attention.qkv.dtype),
             "hidden=%d: a draft in integer arithmetic needs a multiple of 32", m.hidden);
  AQ_TRY(check_optional("q_norm", attention.q_norm));
  AQ_TRY(check_optional("k_norm", attention.k_norm));
  AQ_TRY(check_optional("sinks", attention.sinks));
  AQ_TRY(check_optional("key_shift", attention.key_shift));
  AQ_REQUIRE(attention.window >= 0, "window=%d: must be at least 0 (none)", attention.window);
  return 0;
}

int check_experts(const AqModel& m, const AqExperts& experts) {
  AQ_TRY(check_pointer("experts", &experts, alignof(AqExperts)));
  AQ_TRY(check_linear("router", experts.router, experts.count, m.hidden));
  AQ_REQUIRE(!host::takes_codes(experts.router.dtype) && !host::takes_rounded(experts.router.dtype),
             "router.dtype=%d: must be one of floats in float32 arithmetic", experts.router.dtype);
  AQ_REQUIRE(experts.per_token > 0 && experts.per_token <= kMostExperts && experts.per_token <= experts.count,
             "experts.per_token=%d: must be in [1, %d] and at most experts.count=%d", experts.per_token, kMostExperts,
             experts.count);
  AQ_REQUIRE(experts.gate_up_bytes > 0 && experts.gate_up_bytes % 64 == 0,
             "gate_up_bytes=%lld: must be a positive "
             "multiple of 64",
             (long long)experts.gate_up_bytes);
  AQ_REQUIRE(experts.down_bytes > 0 && experts.down_bytes % 64 == 0,
             "down_bytes=%lld: must be a positive multiple of 64", (long long)experts.down_bytes);
  return 0;
}

int check_layer(const AqModel& m, const AqLayer& layer) {
  AQ_TRY(check_attention(m, layer.attention));
  if (layer.mlp.experts != nullptr) AQ_TRY(check_experts(m, *layer.mlp.experts));
  AQ_REQUIRE(layer.mlp.activation >= AQ_SWIGLU && layer.mlp.activation <= AQ_GEGLU,
             "mlp.activation=%d: must be 0 (SwiGLU), 1 (clamped) or 2 (GeGLU)", layer.mlp.activation);
  AQ_REQUIRE(layer.mlp.activation != AQ_CLAMPED || layer.mlp.limit > 0.0f, "mlp.limit=%g: must be positive",
             (double)layer.mlp.limit);
  AQ_TRY(check_linear("gate_up", layer.mlp.gate_up, 2 * m.intermediate, m.hidden));
  AQ_TRY(check_linear("down", layer.mlp.down, m.hidden, m.intermediate));
  AQ_TRY(check_floats("input_norm", layer.input_norm));
  AQ_TRY(check_floats("post_norm", layer.post_norm));
  if (m.is_draft) AQ_TRY(check_floats("hidden_norm", layer.hidden_norm));
  AQ_TRY(check_optional("attention_out_norm", layer.attention_out_norm));
  AQ_TRY(check_optional("mlp_out_norm", layer.mlp_out_norm));
  AQ_REQUIRE(layer.mlp_out_norm == nullptr || layer.mlp.experts == nullptr,
             "mlp_out_norm must be NULL in a layer with experts");
  return 0;
}

// Checks what rows [begin, end), all of one slot, read: the pages of their contexts, which overlap, and their tails.
int check_context(const AqRows& rows, const AqKV& kv, int begin, int end) {
  const int slot = rows.slots[begin];
  AQ_REQUIRE(slot >= 0 && slot < rows.num_slots, "slots[%d]=%d: must be in [0, %d)", begin, slot, rows.num_slots);
  int low = INT32_MAX, high = 0;
  for (int r = begin; r < end; r++) {
    const int start = rows.key_start[r], length = rows.context_len[r], tail = rows.tail_len[r];
    AQ_REQUIRE(start >= 0, "key_start[%d]=%d: must be at least 0", r, start);
    AQ_REQUIRE(length >= 0, "context_len[%d]=%d: must be at least 0", r, length);
    AQ_REQUIRE(tail >= 0 && tail <= rows.tail_stride, "tail_len[%d]=%d: must be in [0, %d]", r, tail, rows.tail_stride);
    AQ_REQUIRE((int64_t)length + tail > start, "row %d sees no key: key_start=%d, context_len=%d, tail_len=%d", r,
               start, length, tail);
    if (start < length) low = start < low ? start : low, high = length > high ? length : high;
  }
  const int32_t* table = rows.page_table + (size_t)slot * rows.table_stride;
  const int64_t capacity = (int64_t)rows.table_stride * kv.page_size;
  AQ_REQUIRE(high <= capacity, "context_len=%d of slot %d: its page table holds %lld", high, slot, (long long)capacity);
  for (int page = low / kv.page_size; low < high && page <= (high - 1) / kv.page_size; page++)
    AQ_REQUIRE(table[page] >= 0 && table[page] < kv.num_pages, "page_table[%d][%d]=%d: must be in [0, %d)", slot, page,
               table[page], kv.num_pages);
  for (int r = begin; r < end; r++)
    for (int t = 0; t < rows.tail_len[r]; t++)
      AQ_TRY(check_index("tail", r, rows.tail[(size_t)r * rows.tail_stride + t], kv, table, rows.table_stride));
  return 0;
}

}  // namespace

bool has_dot() {
  static const bool has = detect_dot();  // asking takes microseconds in a virtual machine, which traps CPUID
  return has;
}

// Zen 4 and 5 do twice the products of float32 by the dot product, a Granite Rapids three quarters, and by tiles four
// times as many.
int fastest_bf16() {
  if (integer_tiles->has_registers) return code_of(host::Bfloat16Tiles{});
#if defined(__x86_64__)
  if (has_dot() && __builtin_cpu_is("amd")) return code_of(host::Bfloat16Dot{});
#endif
  return code_of(host::Bfloat16{});
}

int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return -1;
}

const char* last_error() { return message; }

int check_pointer(const char* name, const void* pointer, size_t alignment) {
  AQ_REQUIRE(pointer != nullptr, "%s is NULL", name);
  AQ_REQUIRE((uintptr_t)pointer % alignment == 0, "%s is not aligned to %zu bytes", name, alignment);
  return 0;
}

int check_part(const char* name, const AqLinear& linear, int k) {
  const char* format_name = nullptr;
  int alignment = 0, channels = 0, checked = 0;
  host::with_format(linear.dtype, [&](auto format) {
    format_name = format.kName, alignment = format.kAlignment, channels = format.kChannels;
    checked = format.check_cpu(name);
  });
  AQ_REQUIRE(format_name != nullptr, "%s.dtype=%d: must be one of %s", name, linear.dtype,
             codes_of([](auto) { return true; }).c_str());
  AQ_TRY(checked);
  AQ_TRY(check_pointer(name, linear.weight, alignment));
  AQ_TRY(check_optional(name, linear.bias));
  AQ_REQUIRE(linear.n > 0, "%s.n=%d: must be positive", name, linear.n);
  AQ_REQUIRE(linear.k > 0 && linear.k % AQ_LANES == 0, "%s.k=%d: must be a positive multiple of 16", name, linear.k);
  AQ_REQUIRE(linear.k % channels == 0, "%s.k=%d: must be a multiple of %d in %s", name, linear.k, channels,
             format_name);
  AQ_REQUIRE(k == 0 || linear.k == k, "%s.k=%d: must be %d", name, linear.k, k);
  return 0;
}

int check_parts(const char* name, const AqLinear& linear, int n, int k) {
  for (const AqLinear* part = &linear; part != nullptr; part = part->rest) {
    AQ_TRY(check_pointer(name, part, alignof(AqLinear)));
    AQ_TRY(check_part(name, *part, k == 0 ? linear.k : k));
    AQ_REQUIRE(part->rest == nullptr || part->n % 16 == 0, "%s.n=%d: must be a multiple of 16 before a rest", name,
               part->n);
    AQ_REQUIRE(host::takes_codes(part->dtype) == host::takes_codes(linear.dtype) &&
                   host::takes_rounded(part->dtype) == host::takes_rounded(linear.dtype),
               "%s.dtype=%d: its rest must be of the same arithmetic", name, linear.dtype);
  }
  AQ_REQUIRE(n == 0 || num_outputs(linear) == n, "%s.n=%d: must be %d", name, num_outputs(linear), n);
  return 0;
}

int check_linear(const char* name, const AqLinear& linear, int n, int k) {
  AQ_REQUIRE(linear.rest == nullptr, "%s.rest: only qkv may have one", name);
  return check_parts(name, linear, n, k);
}

int check_model(const AqModel* model) {
  AQ_TRY(check_pointer("model", model, alignof(AqModel)));
  const AqModel& m = *model;
  int channels = 1;
  AQ_REQUIRE(m.hidden > 0 && m.hidden % 16 == 0, "hidden=%d: must be a positive multiple of 16", m.hidden);
  AQ_REQUIRE(m.intermediate > 0 && m.intermediate % 16 == 0, "intermediate=%d: must be a positive multiple of 16",
             m.intermediate);
  AQ_REQUIRE(m.head_dim > 0 && m.head_dim % 16 == 0 && m.head_dim <= kMaxHeadDim,
             "head_dim=%d: must be a positive multiple of 16 up to %d", m.head_dim, kMaxHeadDim);
  AQ_REQUIRE(m.num_kv_heads > 0 && m.num_heads > 0 && m.num_heads % m.num_kv_heads == 0 &&
                 m.num_heads / m.num_kv_heads <= kTileQueries,
             "num_heads=%d: must be a multiple, up to %d, of num_kv_heads=%d", m.num_heads, kTileQueries,
             m.num_kv_heads);
  AQ_REQUIRE(m.num_layers > 0 && (!m.is_draft || m.num_layers == 1), "num_layers=%d: must be positive, 1 for a draft",
             m.num_layers);
  AQ_REQUIRE(m.vocab > 0, "vocab=%d: must be positive", m.vocab);
  AQ_TRY(check_element("embed", m.embed_dtype, m.embed));
  host::with_blocks(m.embed_dtype, [&](auto format) { channels = format.kChannels; });
  AQ_REQUIRE(m.hidden % channels == 0, "hidden=%d: must be a multiple of %d for an embedding in blocks", m.hidden,
             channels);
  AQ_TRY(check_floats("inv_freq", m.inv_freq));
  AQ_TRY(check_optional("local_inv_freq", m.local_inv_freq));
  AQ_TRY(check_floats("final_norm", m.final_norm));
  AQ_TRY(check_linear("head", m.head, 0, m.hidden));
  AQ_TRY(check_pointer("layers", m.layers, alignof(AqLayer)));
  for (int i = 0; i < m.num_layers; i++) AQ_TRY(check_layer(m, m.layers[i]));
  AQ_REQUIRE(m.num_capture >= 0, "num_capture=%d: must be at least 0", m.num_capture);
  if (m.num_capture > 0) AQ_TRY(check_pointer("capture", m.capture, sizeof(int32_t)));
  for (int i = 0; i < m.num_capture; i++)
    AQ_REQUIRE(m.capture[i] < m.num_layers && m.capture[i] > (i == 0 ? -1 : m.capture[i - 1]),
               "capture[%d]=%d: must ascend within [0, %d)", i, m.capture[i], m.num_layers);
  return 0;
}

int check_kv(const AqKV* kv, int num_kv_heads, int head_dim) {
  AQ_TRY(check_pointer("kv", kv, alignof(AqKV)));
  size_t size = 0;
  host::with_keys(kv->dtype, [&](auto* element) { size = sizeof *element; });
  const auto is_wanted = [](auto format) { return !host::kIsSame<typename decltype(format)::Key, void>; };
  AQ_REQUIRE(size > 0, "kv.dtype=%d: must be one of %s", kv->dtype, codes_of(is_wanted).c_str());
  AQ_TRY(check_pointer("kv.k", kv->k, size));
  AQ_TRY(check_pointer("kv.v", kv->v, size));
  if (host::holds_codes(kv->dtype)) {
    AQ_TRY(check_pointer("kv.k", kv->k, sizeof(uint32_t)));
    AQ_TRY(check_pointer("kv.k_scales", kv->k_scales, sizeof(float)));
    AQ_TRY(check_pointer("kv.v_scales", kv->v_scales, sizeof(float)));
  }
  AQ_REQUIRE(kv->num_layers > 0, "kv.num_layers=%d: must be positive", kv->num_layers);
  AQ_REQUIRE(kv->num_pages > 0, "kv.num_pages=%d: must be positive", kv->num_pages);
  AQ_REQUIRE(kv->page_size > 0 && kv->page_size % 16 == 0, "kv.page_size=%d: must be a positive multiple of 16",
             kv->page_size);
  AQ_REQUIRE(kv->num_kv_heads > 0 && (num_kv_heads == 0 || kv->num_kv_heads == num_kv_heads),
             "kv.num_kv_heads=%d: must be %d", kv->num_kv_heads, num_kv_heads);
  AQ_REQUIRE(kv->head_dim > 0 && kv->head_dim % 16 == 0 && kv->head_dim <= kMaxHeadDim,
             "kv.head_dim=%d: must be a positive multiple of 16 up to %d", kv->head_dim, kMaxHeadDim);
  AQ_REQUIRE(head_dim == 0 || kv->head_dim == head_dim, "kv.head_dim=%d: must be %d", kv->head_dim, head_dim);
  return 0;
}

int check_index(const char* name, int row, int index, const AqKV& kv, const int32_t* table, int table_stride) {
  AQ_REQUIRE(index >= 0 && index / kv.page_size < table_stride, "%s[%d]=%d: must be in [0, %lld)", name, row, index,
             (long long)table_stride * kv.page_size);
  const int page = table[index / kv.page_size];
  AQ_REQUIRE(page >= 0 && page < kv.num_pages, "%s[%d]=%d lies in page %d: must be in [0, %d)", name, row, index, page,
             kv.num_pages);
  return 0;
}

// vocab = 0: tokens and positions are not used and not checked. reads: the rows attend, so what they read is checked.
int check_rows(const AqRows* rows, const AqKV& kv, int vocab, bool reads) {
  AQ_TRY(check_pointer("rows", rows, alignof(AqRows)));
  AQ_REQUIRE(rows->num_rows >= 0, "num_rows=%d: must be at least 0", rows->num_rows);
  AQ_REQUIRE(rows->num_slots > 0, "num_slots=%d: must be positive", rows->num_slots);
  AQ_REQUIRE(rows->table_stride > 0, "table_stride=%d: must be positive", rows->table_stride);
  AQ_REQUIRE(rows->tail_stride >= 0, "tail_stride=%d: must be at least 0", rows->tail_stride);
  const struct {
    const char* name;
    const int32_t* pointer;
    bool needed;
  } arrays[] = {
      {"slots", rows->slots, true},
      {"write", rows->write, true},
      {"page_table", rows->page_table, true},
      {"key_start", rows->key_start, reads},
      {"tail_len", rows->tail_len, reads},
      {"context_len", rows->context_len, reads},
      {"tail", rows->tail, reads && rows->tail_stride > 0},
      {"tokens", rows->tokens, vocab > 0},
      {"positions", rows->positions, vocab > 0},
  };
  for (const auto& array : arrays)
    if (array.needed) AQ_TRY(check_pointer(array.name, array.pointer, sizeof(int32_t)));
  for (int r = 0; r < rows->num_rows; r++) {
    const int slot = rows->slots[r];
    AQ_REQUIRE(slot >= 0 && slot < rows->num_slots, "slots[%d]=%d: must be in [0, %d)", r, slot, rows->num_slots);
    if (vocab > 0) {
      AQ_REQUIRE(rows->tokens[r] >= 0 && rows->tokens[r] < vocab, "tokens[%d]=%d: must be in [0, %d)", r,
                 rows->tokens[r], vocab);
      AQ_REQUIRE(rows->positions[r] >= 0, "positions[%d]=%d: must be at least 0", r, rows->positions[r]);
    }
    AQ_REQUIRE(rows->write[r] >= -1, "write[%d]=%d: must be at least -1 (nothing)", r, rows->write[r]);
    if (rows->write[r] >= 0)
      AQ_TRY(check_index("write", r, rows->write[r], kv, rows->page_table + (size_t)slot * rows->table_stride,
                         rows->table_stride));
  }
  for (int begin = 0, end; reads && begin < rows->num_rows; begin = end) {
    for (end = begin + 1; end < rows->num_rows && rows->slots[end] == rows->slots[begin];) end++;
    AQ_TRY(check_context(*rows, kv, begin, end));
  }
  return 0;
}

int check_sampling(const AqSampling* sampling, int n) {
  AQ_TRY(check_pointer("sampling", sampling, alignof(AqSampling)));
  for (int i = 0; i < n; i++) {
    const AqSampling& s = sampling[i];
    AQ_REQUIRE(s.temperature >= 0.0f && s.temperature < 1e30f, "temperature[%d]=%g: must be finite, at least 0", i,
               (double)s.temperature);
    AQ_REQUIRE(s.top_p >= 0.0f && s.top_p <= 1.0f, "top_p[%d]=%g: must be in [0, 1]", i, (double)s.top_p);
    AQ_REQUIRE(s.min_p >= 0.0f && s.min_p <= 1.0f, "min_p[%d]=%g: must be in [0, 1]", i, (double)s.min_p);
    AQ_REQUIRE(s.top_k >= 0, "top_k[%d]=%d: must be at least 0 (off)", i, s.top_k);
  }
  return 0;
}

}  // namespace aq
