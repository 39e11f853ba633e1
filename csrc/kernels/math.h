// exp, log, sine and cosine as polynomials: no libm, whose results differ between machines.
#pragma once
#include "simd/simd.h"

namespace AQ_NAMESPACE {

constexpr float kInfinity = __builtin_inff();

// e^x within 2 ulp; exactly 1 at 0, 0 below the smallest normal number. Coefficients: Cephes expf.
AQ_INLINE Vec exp(Vec x) {
  const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const Vec t = fma(x, set1(1.44269504f), magic);
  const Vec n = sub(t, magic);
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  // Times 2^n, on the exponent's bits: the result is neither subnormal nor too large where it is used.
  p = as_float(iadd(as_int(p), shl<23>(as_int(t))));
  p = select(less(x, set1(-87.33654f)), zero(), p);
  return select(less(x, set1(88.72284f)), p, add(x, set1(kInfinity)));
}

// The same bits for an x that is not above 0, or a NaN, of COUNT vectors step by step: a CPU looks too few operations
// ahead to find work in the next exponential while one waits for its own results.
template <int COUNT> AQ_INLINE void exp_below(Vec* x) {
#define AQ_EACH _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; i++)
  const Vec magic =
      set1(-12582912.0f);  // t has the other sign: max(NaN, magic) is magic, which leaves a NaN p as it is
  Vec t[COUNT], n[COUNT], r[COUNT], p[COUNT];
  AQ_EACH t[i] = fma(x[i], set1(-1.44269504f), magic);
  AQ_EACH n[i] = sub(magic, t[i]);
  AQ_EACH r[i] = fma(n[i], set1(-0.693359375f), x[i]);
  AQ_EACH r[i] = fma(n[i], set1(2.12194440e-4f), r[i]);
  AQ_EACH t[i] = as_float(shl<23>(as_int(max(t[i], magic))));
  AQ_EACH p[i] = fma(set1(1.9875691500e-4f), r[i], set1(1.3981999507e-3f));
  AQ_EACH n[i] = mul(r[i], r[i]);
  AQ_EACH p[i] = fma(p[i], r[i], set1(8.3334519073e-3f));
  AQ_EACH p[i] = fma(p[i], r[i], set1(4.1665795894e-2f));
  AQ_EACH p[i] = fma(p[i], r[i], set1(1.6666665459e-1f));
  AQ_EACH p[i] = fma(p[i], r[i], set1(5.0000001201e-1f));
  AQ_EACH p[i] = fma(p[i], n[i], r[i]);
  AQ_EACH p[i] = add(p[i], set1(1.0f));
  AQ_EACH p[i] = as_float(iadd(as_int(p[i]), as_int(t[i])));
  AQ_EACH x[i] = select(less(x[i], set1(-87.33654f)), zero(), p[i]);
#undef AQ_EACH
}

// ln x of a positive normal x within 2 ulp. Coefficients: Cephes logf.
AQ_INLINE Vec log(Vec x) {
  const uint32_t root_half = 0x3f3504f3;  // sqrt(1/2): the mantissa is taken from [sqrt(1/2), sqrt(2))
  const IVec bits = iadd(as_int(x), iset1(0x3f800000 - root_half));
  const Vec e = sub(to_float(shr<23>(bits)), set1(127.0f));
  const Vec f = sub(as_float(iadd(iand(bits, iset1(0x7fffff)), iset1(root_half))), set1(1.0f));
  const Vec square = mul(f, f);
  Vec p = set1(7.0376836292e-2f);
  p = fma(p, f, set1(-1.1514610310e-1f));
  p = fma(p, f, set1(1.1676998740e-1f));
  p = fma(p, f, set1(-1.2420140846e-1f));
  p = fma(p, f, set1(1.4249322787e-1f));
  p = fma(p, f, set1(-1.6668057665e-1f));
  p = fma(p, f, set1(2.0000714765e-1f));
  p = fma(p, f, set1(-2.4999993993e-1f));
  p = fma(p, f, set1(3.3333331174e-1f));
  p = mul(mul(p, f), square);
  p = fma(e, set1(-2.12194440e-4f), p);
  p = fma(square, set1(-0.5f), p);
  return fma(e, set1(0.693359375f), add(f, p));
}

AQ_INLINE float exp1(float x) {
  float lane[16];
  store(lane, exp(set1(x)));
  return lane[0];
}

AQ_INLINE float log1(float x) {
  float lane[16];
  store(lane, log(set1(x)));
  return lane[0];
}

AQ_INLINE Vec silu(Vec x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// (up + 1) * gate * sigmoid(1.702 gate), gate at most `limit` and up within it. A NaN stays one.
// Source: openai/gpt-oss, gpt_oss/torch/model.py, swiglu.
AQ_INLINE Vec clamped_swiglu(Vec gate, Vec up, float limit) {
  const Vec most = set1(limit), least = set1(-limit);
  gate = select(less(most, gate), most, gate);
  up = select(less(most, up), most, select(less(up, least), least, up));
  return mul(add(up, set1(1.0f)), div(gate, add(set1(1.0f), exp(mul(gate, set1(-1.702f))))));
}

// gelu(gate) * up by the tanh form of gelu, 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
AQ_INLINE Vec geglu(Vec gate, Vec up) {
  const Vec cubic = fma(mul(gate, gate), set1(0.044715f), set1(1.0f));
  const Vec angle = mul(mul(gate, cubic), set1(-1.59576912f));  // -2 u
  return mul(div(gate, add(set1(1.0f), exp(angle))), up);
}

// Cosine and sine in double of an angle up to about 1.6e6: a two-part pi/2, of which n times the first is exact, then
// the polynomials of fdlibm on [-pi/4, pi/4].
AQ_INLINE void cos_sin(float angle, double* cosine, double* sine) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const double x = angle;
  const double n = (x * 0.63661977236758134308 + magic) - magic;
  const double r = (x - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;
  const double z = r * r;
  const double s = r + r * z *
                           (-1.66666666666666324348e-01 +
                            z * (8.33333333332248946124e-03 +
                                 z * (-1.98412698298579493134e-04 +
                                      z * (2.75573137070700676789e-06 +
                                           z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
  const double c = 1.0 - 0.5 * z +
                   z * z *
                       (4.16666666666666019037e-02 +
                        z * (-1.38888888888741095749e-03 +
                             z * (2.48015872894767294178e-05 +
                                  z * (-2.75573143513906633035e-07 +
                                       z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
  const int64_t quadrant = (int64_t)n & 3;
  *cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
  *sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
}

}  // namespace AQ_NAMESPACE
