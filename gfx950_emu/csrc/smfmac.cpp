// Sparse matrix instructions: D += A x B, where A keeps two of each four neighbours along k.
//
// M x M x K: lane group g (of 64 / M) holds the dense places k = g E .. g E + E - 1 of its row of A and
// column of B, E = K M / 64. A's register elements 2 q and 2 q + 1 of a lane lie in the dense places
// 4 q .. 4 q + 3 of its run; two bits for each, lowest first, in the lane's index register say where.
// E bits of indices are needed; when the register holds several sets, abid picks one if cbsz is 0, else
// the first is used. The order of accumulation is k ascending, as in mfma.cpp; what A does not keep is
// not multiplied. The layouts of the shapes that gfx950 added follow from the smaller ones'.
#include "mfma.h"

namespace emu {
namespace {

struct Shape {
  const char* name;
  int m, k;
  Elem a, b;
};
constexpr Shape kShapes[] = {
    {"f32_16x16x32_f16", 16, 32, E_F16, E_F16},
    {"f32_32x32x16_f16", 32, 16, E_F16, E_F16},
    {"f32_16x16x32_bf16", 16, 32, E_BF16, E_BF16},
    {"f32_32x32x16_bf16", 32, 16, E_BF16, E_BF16},
    {"i32_16x16x64_i8", 16, 64, E_I8, E_I8},
    {"i32_32x32x32_i8", 32, 32, E_I8, E_I8},
    {"f32_16x16x64_bf8_bf8", 16, 64, E_BF8, E_BF8},
    {"f32_16x16x64_bf8_fp8", 16, 64, E_BF8, E_FP8},
    {"f32_16x16x64_fp8_bf8", 16, 64, E_FP8, E_BF8},
    {"f32_16x16x64_fp8_fp8", 16, 64, E_FP8, E_FP8},
    {"f32_32x32x32_bf8_bf8", 32, 32, E_BF8, E_BF8},
    {"f32_32x32x32_bf8_fp8", 32, 32, E_BF8, E_FP8},
    {"f32_32x32x32_fp8_bf8", 32, 32, E_FP8, E_BF8},
    {"f32_32x32x32_fp8_fp8", 32, 32, E_FP8, E_FP8},
    {"f32_16x16x64_f16", 16, 64, E_F16, E_F16},
    {"f32_32x32x32_f16", 32, 32, E_F16, E_F16},
    {"f32_16x16x64_bf16", 16, 64, E_BF16, E_BF16},
    {"f32_32x32x32_bf16", 32, 32, E_BF16, E_BF16},
    {"i32_16x16x128_i8", 16, 128, E_I8, E_I8},
    {"i32_32x32x64_i8", 32, 64, E_I8, E_I8},
    {"f32_16x16x128_bf8_bf8", 16, 128, E_BF8, E_BF8},
    {"f32_16x16x128_bf8_fp8", 16, 128, E_BF8, E_FP8},
    {"f32_16x16x128_fp8_bf8", 16, 128, E_FP8, E_BF8},
    {"f32_16x16x128_fp8_fp8", 16, 128, E_FP8, E_FP8},
    {"f32_32x32x64_bf8_bf8", 32, 64, E_BF8, E_BF8},
    {"f32_32x32x64_bf8_fp8", 32, 64, E_BF8, E_FP8},
    {"f32_32x32x64_fp8_bf8", 32, 64, E_FP8, E_BF8},
    {"f32_32x32x64_fp8_fp8", 32, 64, E_FP8, E_FP8},
};

template <int N>
void h_smfmac(Wave& w, const Inst& i) {
  constexpr const Shape& s = kShapes[N];
  constexpr int M = s.m, run = s.k * M / kLanes, kept = run / 2, groups = kLanes / M;
  constexpr int bits_ = 2 * kept, sets = 32 / bits_;
  alignas(64) float a[kept][kLanes], b[s.k][M], d[M][M];
  for (int n = 0; n < kept; n++) elements<s.a>(w, i.src[0].reg, n, a[n]);
  for (int n = 0; n < run; n++) {
    alignas(64) float x[kLanes];
    elements<s.b>(w, i.src[1].reg, n, x);
    for (int l = 0; l < kLanes; l++) b[l / M * run + n][l % M] = x[l];
  }
  const u32* index = w.reg(i.src[2].reg);
  const int shift = i.cbsz ? 0 : (i.abid & (sets - 1)) * bits_;
  int dst = i.dst[0].reg;
  for (int r = 0; r < M * M / kLanes; r++)
    for (int l = 0; l < kLanes; l++) d[d_row(M, l, r)][l % M] = f32(w.reg(dst + r)[l]);
  for (int row = 0; row < M; row++)
    for (int g = 0; g < groups; g++)
      for (int n = 0; n < kept; n++) {
        int l = g * M + row;
        u32 at = index[l] >> shift >> (2 * n) & 3;
        const float* column = b[g * run + n / 2 * 4 + at];
        float x = a[n][l];
        for (int c = 0; c < M; c++) {
          if constexpr (s.a == E_I8)
            d[row][c] = f32(bits(d[row][c]) + (u32)((i32)x * (i32)column[c]));
          else
            d[row][c] = __builtin_fmaf(x, column[c], d[row][c]);
        }
      }
  u64 undef = 0;  // D is an input too
  for (int k = 0; k < i.dst[0].width; k++) undef |= w.undef[dst + k];
  for (int r = 0; r < M * M / kLanes; r++)
    for (int l = 0; l < kLanes; l++) w.reg(dst + r)[l] = bits(d[d_row(M, l, r)][l % M]);
  undef_result(w, i);
  if (undef)
    for (int k = 0; k < i.dst[0].width; k++) w.undef[dst + k] = ~0ull;
}

template <int N>
void add_shapes() {
  if constexpr (N < (int)(sizeof kShapes / sizeof kShapes[0])) {
    constexpr const Shape& s = kShapes[N];
    auto b = [](int bytes) { return "b" + std::to_string(8 * bytes); };
    int lane = s.m * s.k / kLanes * elem_bytes(s.b);
    std::string form = "r" + b(s.m * s.m / kLanes * 4) + " v" + b(lane / 2) + " v" + b(lane) + " vb32";
    Reg((std::string("v_smfmac_") + s.name).c_str(), FAM_MFMA, form.c_str(), h_smfmac<N>, P_CUSTOM,
        s.m * s.m * s.k / 2);
    add_shapes<N + 1>();
  }
}
struct Table {
  Table() { add_shapes<0>(); }
} table;

}  // namespace
}  // namespace emu
