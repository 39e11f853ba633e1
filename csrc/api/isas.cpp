#include "isas.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace aq {

namespace {

#if defined(__aarch64__)
// Whether the CPU has the dot products of bytes, FEAT_DotProd.
bool has_byte_dot() {
#if defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}
#endif

#if defined(__x86_64__)
// Whether the CPU has AMX's tile registers and their products of bytes and of bfloat16, and the operating system knows
// the registers.
bool has_tile_registers() {
  unsigned a = 0, b = 0, c = 0, d = 0, low = 0, high = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0) return false;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kSaved = 3u << 17, kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, registers, bytes
  return (low & kSaved) == kSaved && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAmx) == kAmx;
}

// Asks the operating system to save the contents of the tile registers, for all threads of the process.
bool grants_tile_registers() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kContents = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kContents) == 0;
#else
  return false;
#endif
}
#endif

const Isa* first_available(const std::vector<Isa>& isas) {
  for (const Isa& isa : isas)
    if (isa.available) return &isa;
  return nullptr;  // not reached: the portable kernels are always available
}

// The best first, but behind them the twin, which is chosen by name only.
std::vector<Isa> detect() {
  std::vector<Isa> isas;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
  const bool fma = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = wide && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & (1u << 11)) != 0;
  const bool short_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)) != 0;
  const bool amx = fma && vnni && amx::kIntegerTiles.has_registers && has_tile_registers();
  isas.push_back({"amx", &avx512::kKernels, &amx::kIntegerTiles, amx && grants_tile_registers()});
  isas.push_back({"avx512_vnni", &avx512::kKernels, &avx512_vnni::kIntegerTiles, fma && vnni});
  isas.push_back({"avx512", &avx512::kKernels, &avx2::kIntegerTiles, fma && wide});
  isas.push_back({"avx_vnni", &avx2::kKernels, &avx_vnni::kIntegerTiles, fma && short_vnni});
  isas.push_back({"avx2", &avx2::kKernels, &avx2::kIntegerTiles, fma});
#elif defined(__aarch64__)
  isas.push_back({"neon_dot", &neon::kKernels, &neon_dot::kIntegerTiles, has_byte_dot()});
  isas.push_back({"neon", &neon::kKernels, &neon::kIntegerTiles, true});
#endif
  isas.push_back({"portable", &portable::kKernels, &portable::kIntegerTiles, true});
  isas.push_back({"amx_twin", first_available(isas)->kernels, &amx_twin::kIntegerTiles, true});
  return isas;
}

}  // namespace

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = detect();
  return all;
}

const Isa* best_isa() { return first_available(isas()); }

}  // namespace aq
