// Matrix instructions: D = C + A x B, one dense matrix product a wave.
//
// Order of accumulation (hardware's is not documented): each element starts at C and takes the
// products for k = 0, 1, ... by fused multiply-add in f32 (f64 in f64; integers exactly, modulo
// 2^32). Layouts: see README.md.
#include "mfma.h"

namespace emu {
namespace {

struct Shape {
  const char* name;
  int m, k, blocks;
  Elem a, b;
};
constexpr Shape kShapes[] = {
    {"f32_32x32x1_2b_f32", 32, 1, 2, E_F32, E_F32},
    {"f32_16x16x1_4b_f32", 16, 1, 4, E_F32, E_F32},
    {"f32_4x4x1_16b_f32", 4, 1, 16, E_F32, E_F32},
    {"f32_32x32x2_f32", 32, 2, 1, E_F32, E_F32},
    {"f32_16x16x4_f32", 16, 4, 1, E_F32, E_F32},
    {"f32_32x32x4_2b_f16", 32, 4, 2, E_F16, E_F16},
    {"f32_16x16x4_4b_f16", 16, 4, 4, E_F16, E_F16},
    {"f32_4x4x4_16b_f16", 4, 4, 16, E_F16, E_F16},
    {"f32_32x32x8_f16", 32, 8, 1, E_F16, E_F16},
    {"f32_16x16x16_f16", 16, 16, 1, E_F16, E_F16},
    {"f32_16x16x32_f16", 16, 32, 1, E_F16, E_F16},
    {"f32_32x32x16_f16", 32, 16, 1, E_F16, E_F16},
    {"f32_32x32x4_2b_bf16", 32, 4, 2, E_BF16, E_BF16},
    {"f32_16x16x4_4b_bf16", 16, 4, 4, E_BF16, E_BF16},
    {"f32_4x4x4_16b_bf16", 4, 4, 16, E_BF16, E_BF16},
    {"f32_32x32x8_bf16", 32, 8, 1, E_BF16, E_BF16},
    {"f32_16x16x16_bf16", 16, 16, 1, E_BF16, E_BF16},
    {"f32_16x16x32_bf16", 16, 32, 1, E_BF16, E_BF16},
    {"f32_32x32x16_bf16", 32, 16, 1, E_BF16, E_BF16},
    {"i32_32x32x4_2b_i8", 32, 4, 2, E_I8, E_I8},
    {"i32_16x16x4_4b_i8", 16, 4, 4, E_I8, E_I8},
    {"i32_4x4x4_16b_i8", 4, 4, 16, E_I8, E_I8},
    {"i32_32x32x16_i8", 32, 16, 1, E_I8, E_I8},
    {"i32_16x16x32_i8", 16, 32, 1, E_I8, E_I8},
    {"i32_16x16x64_i8", 16, 64, 1, E_I8, E_I8},
    {"i32_32x32x32_i8", 32, 32, 1, E_I8, E_I8},
    {"f64_16x16x4_f64", 16, 4, 1, E_F64, E_F64},
    {"f64_4x4x4_4b_f64", 4, 4, 4, E_F64, E_F64},
    {"f32_16x16x32_bf8_bf8", 16, 32, 1, E_BF8, E_BF8},
    {"f32_16x16x32_bf8_fp8", 16, 32, 1, E_BF8, E_FP8},
    {"f32_16x16x32_fp8_bf8", 16, 32, 1, E_FP8, E_BF8},
    {"f32_16x16x32_fp8_fp8", 16, 32, 1, E_FP8, E_FP8},
    {"f32_32x32x16_bf8_bf8", 32, 16, 1, E_BF8, E_BF8},
    {"f32_32x32x16_bf8_fp8", 32, 16, 1, E_BF8, E_FP8},
    {"f32_32x32x16_fp8_bf8", 32, 16, 1, E_FP8, E_BF8},
    {"f32_32x32x16_fp8_fp8", 32, 16, 1, E_FP8, E_FP8},
    {"f32_16x16x128_f8f6f4", 16, 128, 1, E_F8F6F4, E_F8F6F4},
    {"f32_32x32x64_f8f6f4", 32, 64, 1, E_F8F6F4, E_F8F6F4},
};

alignas(64) thread_local float gA[32 * 128], gB[32 * 128];  // A[k][row], B[k][column]
alignas(64) thread_local float gC[32 * 32];

void load_c(Wave& w, const Inst& i, int m, int block, int blocks) {
  int regs = m * m / kLanes;  // of one block; 4x4 has sixteen blocks in lane groups
  const Operand& c = i.src[2];
  if (c.kind != K_VGPR) {
    float v = f32(read_scalar(w, c));
    for (int n = 0; n < m * m; n++) gC[n] = v;
    return;
  }
  if (m == 4) {
    for (int l = 4 * block; l < 4 * block + 4; l++)
      for (int r = 0; r < 4; r++) gC[r * m + l % 4] = f32(w.reg(c.reg + r)[l]);
    return;
  }
  (void)blocks;
  for (int r = 0; r < regs; r++) {
    const u32* p = w.reg(c.reg + block * regs + r);
    for (int l = 0; l < kLanes; l++) gC[d_row(m, l, r) * m + l % m] = f32(p[l]);
  }
}
void store_d(Wave& w, const Inst& i, int m, int block) {
  int regs = m * m / kLanes, reg = i.dst[0].reg;
  if (m == 4) {
    for (int l = 4 * block; l < 4 * block + 4; l++)
      for (int r = 0; r < 4; r++) w.reg(reg + r)[l] = bits(gC[r * m + l % 4]);
    return;
  }
  for (int r = 0; r < regs; r++) {
    u32* p = w.reg(reg + block * regs + r);
    for (int l = 0; l < kLanes; l++) p[l] = bits(gC[d_row(m, l, r) * m + l % m]);
  }
}

// Rows in groups, so that their chains of additions overlap.
#ifdef __AVX512F__
using Vec = __m512;
constexpr int kVec = 16;
Vec load(const float* p) { return _mm512_loadu_ps(p); }
void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
Vec fma(float a, Vec b, Vec c) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c); }
#else
using Vec = float;
constexpr int kVec = 1;
Vec load(const float* p) { return *p; }
void store(float* p, Vec v) { *p = v; }
Vec fma(float a, Vec b, Vec c) { return __builtin_fmaf(a, b, c); }
#endif
template <int M>
void multiply(int k_total) {
  constexpr int kWidth = M < kVec ? 1 : M / kVec, kGroup = M == 4 ? 1 : 8;
  if constexpr (M < kVec) {  // 4x4
    for (int row = 0; row < M; row++)
      for (int n = 0; n < M; n++)
        for (int k = 0; k < k_total; k++)
          gC[row * M + n] = __builtin_fmaf(gA[k * M + row], gB[k * M + n], gC[row * M + n]);
    return;
  } else {
    for (int row = 0; row < M; row += kGroup) {
      Vec acc[kGroup][kWidth];
      for (int r = 0; r < kGroup; r++)
        for (int n = 0; n < kWidth; n++) acc[r][n] = load(gC + (row + r) * M + n * kVec);
      for (int k = 0; k < k_total; k++) {
        const float* a = gA + k * M + row;
        for (int n = 0; n < kWidth; n++) {
          Vec b = load(gB + k * M + n * kVec);
#pragma GCC unroll 8
          for (int r = 0; r < kGroup; r++) acc[r][n] = fma(a[r], b, acc[r][n]);
        }
      }
      for (int r = 0; r < kGroup; r++)
        for (int n = 0; n < kWidth; n++) store(gC + (row + r) * M + n * kVec, acc[r][n]);
    }
  }
}
void multiply(int m, int k) {
  if (m == 32) multiply<32>(k);
  else if (m == 16) multiply<16>(k);
  else multiply<4>(k);
}
void multiply_int(int m, int k_total) {
  for (int row = 0; row < m; row++)
    for (int n = 0; n < m; n++) {
      u32 acc = bits(gC[row * m + n]);
      for (int k = 0; k < k_total; k++)
        acc += (u32)((i32)gA[k * m + row] * (i32)gB[k * m + n]);
      gC[row * m + n] = f32(acc);
    }
}

}  // namespace

void undef_result(Wave& w, const Inst& i) {
  u64 u = 0;
  for (const Operand& o : i.src) {
    if (o.kind == K_VGPR)
      for (int k = 0; k < o.width; k++) u |= w.undef[o.reg + k];
  }
  for (int k = 0; k < i.dst[0].width; k++) w.undef[i.dst[0].reg + k] = u ? ~0ull : 0;
}

namespace {

template <int N>
void h_mfma(Wave& w, const Inst& i) {
  constexpr const Shape& s = kShapes[N];
  const int m = s.m, k = s.k, each = m * k * s.blocks / kLanes, groups = k / each;
  for (int block = 0; block < s.blocks; block++) {
    // cbsz and abid: one block of A serves 2^cbsz blocks.
    int a_block = i.cbsz ? (block >> i.cbsz << i.cbsz) + i.abid : block;
    auto fill = [&](auto elem, int reg, int from, float* to) {
      alignas(64) float x[kLanes];
      for (int n = 0; n < each; n++) {
        elements<decltype(elem)::value>(w, reg, n, x);
        for (int part = 0; part < kLanes / m; part++) {
          if (part / groups != from) continue;
          float* row = to + (part % groups * each + n) * m;
          for (int l = 0; l < m; l++) row[l] = x[part * m + l];
        }
      }
    };
    fill(std::integral_constant<Elem, s.a>{}, i.src[0].reg, a_block, gA);
    fill(std::integral_constant<Elem, s.b>{}, i.src[1].reg, block, gB);
    load_c(w, i, m, block, s.blocks);
    if (s.a == E_I8) multiply_int(m, k);
    else multiply(m, k);
    if (s.blocks == 1) {
      store_d(w, i, m, 0);
    } else {
      store_d(w, i, m, block);
    }
  }
  undef_result(w, i);
}

void mfma_f64(Wave& w, const Inst& i, bool small) {
  double a[4][4][16], b[4][4][16], d[4][16][16];  // [block][k][row or column]
  auto get = [&](const Operand& o, int r, int l) {
    if (o.kind != K_VGPR) return f64(read_scalar64(w, o));
    return f64(join(w.reg(o.reg + 2 * r)[l], w.reg(o.reg + 2 * r + 1)[l]));
  };
  int m = small ? 4 : 16, regs = small ? 1 : 4;
  auto place = [&](int l, int r, int& block, int& row) {
    block = small ? l / 4 % 4 : 0;
    row = small ? l / 16 : 4 * r + l / 16;
  };
  for (int l = 0; l < kLanes; l++) {
    int block, row;
    place(l, 0, block, row);
    a[block][l / 16][l % m] = get(i.src[0], 0, l) * (i.neg_lo & 1 ? -1 : 1);
    b[block][l / 16][l % m] = get(i.src[1], 0, l) * (i.neg_lo & 2 ? -1 : 1);
    for (int r = 0; r < regs; r++) {
      place(l, r, block, row);
      d[block][row][l % m] = get(i.src[2], r, l) * (i.neg_lo & 4 ? -1 : 1);
    }
  }
  for (int l = 0; l < kLanes; l++)
    for (int r = 0; r < regs; r++) {
      int block, row;
      place(l, r, block, row);
      double acc = d[block][row][l % m];
      for (int k = 0; k < 4; k++) acc = std::fma(a[block][k][row], b[block][k][l % m], acc);
      w.reg(i.dst[0].reg + 2 * r)[l] = (u32)bits(acc);
      w.reg(i.dst[0].reg + 2 * r + 1)[l] = (u32)(bits(acc) >> 32);
    }
  undef_result(w, i);
}
void h_f64_16(Wave& w, const Inst& i) { mfma_f64(w, i, false); }
void h_f64_4(Wave& w, const Inst& i) { mfma_f64(w, i, true); }

// f8f6f4: 8-bit operands come as two runs of 16 (k = 16g.. and K/2 + 16g..), smaller ones as one
// run of 32 (k = 32g..). The scale of block k / 32 is a byte in lane group k / 32.
void f8f6f4_elements(Wave& w, int reg, int n, int code, float* out) {
  const float* t = small_tables()[code];
  if (code < 2) {
    const u32* p = w.reg(reg + n / 4);
    for (int l = 0; l < kLanes; l++) out[l] = t[p[l] >> (8 * (n & 3)) & 0xff];
  } else if (code == 4) {
    const u32* p = w.reg(reg + n / 8);
    for (int l = 0; l < kLanes; l++) out[l] = t[p[l] >> (4 * (n & 7)) & 0xf];
  } else {
    int bit = 6 * n, word = bit >> 5, at = bit & 31;
    const u32 *p = w.reg(reg + word), *q = word + 1 < 6 ? w.reg(reg + word + 1) : p;
    for (int l = 0; l < kLanes; l++) out[l] = t[join(p[l], q[l]) >> at & 63];
  }
}
float e8m0(u32 byte) { return byte == 255 ? NAN : (float)std::ldexp(1.0, (int)byte - 127); }

template <int M, int K, bool Scaled>
void h_f8f6f4(Wave& w, const Inst& i) {
  float scale[2][K / 32][M];
  for (int side = 0; side < 2; side++) {
    if (!Scaled) break;
    Lanes t;
    const u32* s = fetch(w, i, 3 + side, t);
    int byte = (i.op_sel >> side & 1) | (i.op_sel_hi >> side & 1) << 1;
    for (int l = 0; l < kLanes; l++) scale[side][l / M][l % M] = e8m0(s[l] >> (8 * byte) & 0xff);
  }
  for (int side = 0; side < 2; side++) {
    int code = side ? i.blgp : i.cbsz, reg = i.src[side].reg;
    float* to = side ? gB : gA;
    alignas(64) float x[kLanes];
    for (int n = 0; n < 32; n++) {
      f8f6f4_elements(w, reg, n, code, x);
      for (int g = 0; g < kLanes / M; g++) {
        int k = code < 2 ? (n < 16 ? 16 * g + n : K / 2 + 16 * g + n - 16) : 32 * g + n;
        for (int at = 0; at < M; at++)
          to[k * M + at] = Scaled ? x[g * M + at] * scale[side][k / 32][at] : x[g * M + at];
      }
    }
  }
  load_c(w, i, M, 0, 1);
  multiply<M>(K);
  store_d(w, i, M, 0);
  undef_result(w, i);
}

template <int N>
void add_shapes() {
  if constexpr (N < (int)(sizeof kShapes / sizeof kShapes[0])) {
    constexpr const Shape& s = kShapes[N];
    auto b = [](int regs) { return "b" + std::to_string(32 * regs); };
    u32 macs = s.m * s.m * s.k * s.blocks;
    std::string d = b(s.m * s.m * s.blocks / kLanes * (s.a == E_F64 ? 2 : 1)), form;
    if constexpr (s.a == E_F8F6F4) {
      form = "d" + d + " s? s? s" + d;
      std::string name = std::string("v_mfma_") + s.name;
      Reg(name.c_str(), FAM_MFMA, form.c_str(), h_f8f6f4<s.m, s.k, false>, P_CUSTOM, macs);
      std::string scaled = std::string("v_mfma_scale_") + s.name;
      Reg(scaled.c_str(), FAM_MFMA, (form + " sb32 sb32").c_str(), h_f8f6f4<s.m, s.k, true>,
          P_CUSTOM, macs);
    } else {
      int bytes = s.m * s.k * s.blocks / kLanes * elem_bytes(s.a), regs = bytes < 4 ? 1 : bytes / 4;
      const char* c = s.a == E_F64 ? " sf" : s.a == E_I8 ? " sb" : " sf";
      if (s.a == E_F64 && s.m == 16) c = " sb";
      if (s.m * s.m * s.blocks / kLanes * (s.a == E_F64 ? 2 : 1) > 2) c = " sb";
      form = "d" + d + " s" + b(regs) + " s" + b(regs) + c + d.substr(1);
      Handler h = s.a != E_F64 ? h_mfma<N> : s.m == 16 ? h_f64_16 : h_f64_4;
      Reg((std::string("v_mfma_") + s.name).c_str(), FAM_MFMA, form.c_str(), h, P_CUSTOM, macs);
    }
    add_shapes<N + 1>();
  }
}
struct Table {
  Table() { add_shapes<0>(); }
} table;

}  // namespace
}  // namespace emu
