// Matrix instructions: D = C + A x B, one dense matrix product a wave.
//
// Order of accumulation (hardware's is not documented): each element starts at C and takes the
// products for k = 0, 1, ... by fused multiply-add in f32 (f64 in f64; integers exactly, modulo
// 2^32). Layouts: see README.md.
#include "lanes.h"

namespace emu {
namespace {

enum Elem { E_F32, E_F16, E_BF16, E_I8, E_F64, E_FP8, E_BF8, E_F8F6F4 };

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

int elem_bytes(Elem e) { return e == E_F64 ? 8 : e == E_F32 ? 4 : e == E_F16 || e == E_BF16 ? 2 : 1; }

alignas(64) thread_local float gA[32 * 128], gB[32 * 128];  // A[row][k], B[k][column]
alignas(64) thread_local float gC[32 * 32];

// The float at place `n` of lane `l`'s registers.
float element(Wave& w, int reg, int l, int n, Elem e) {
  switch (e) {
    case E_F32: return f32(w.reg(reg + n)[l]);
    case E_F16: return f16_to_f32(w.reg(reg + n / 2)[l] >> (16 * (n & 1)) & 0xffff);
    case E_BF16: return bf16_to_f32(w.reg(reg + n / 2)[l] >> (16 * (n & 1)) & 0xffff);
    case E_I8: return (float)(i8)(w.reg(reg + n / 4)[l] >> (8 * (n & 3)));
    case E_FP8: return small_tables()[0][w.reg(reg + n / 4)[l] >> (8 * (n & 3)) & 0xff];
    default: return small_tables()[1][w.reg(reg + n / 4)[l] >> (8 * (n & 3)) & 0xff];
  }
}

// Rows of D: register r of lane l.
int d_row(int m, int l, int r) {
  return m == 32 ? 8 * (r / 4) + 4 * (l / 32) + r % 4 : m == 16 ? 4 * (l / 16) + r % 4 : r % 4;
}

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

template <int M>
void multiply(int k_total) {
  for (int row = 0; row < M; row++) {
    float acc[M];
    for (int n = 0; n < M; n++) acc[n] = gC[row * M + n];
    const float* a = gA + row * k_total;
    for (int k = 0; k < k_total; k++) {
      float x = a[k];
      const float* b = gB + k * M;
      for (int n = 0; n < M; n++) acc[n] = __builtin_fmaf(x, b[n], acc[n]);
    }
    for (int n = 0; n < M; n++) gC[row * M + n] = acc[n];
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
        acc += (u32)((i32)gA[row * k_total + k] * (i32)gB[k * m + n]);
      gC[row * m + n] = f32(acc);
    }
}

void undef_result(Wave& w, const Inst& i) {  // any undefined input spoils the whole result
  u64 u = 0;
  for (const Operand& o : i.src) {
    if (o.kind == K_VGPR)
      for (int k = 0; k < o.width; k++) u |= w.undef[o.reg + k];
  }
  for (int k = 0; k < i.dst[0].width; k++) w.undef[i.dst[0].reg + k] = u ? ~0ull : 0;
}

template <int N>
void h_mfma(Wave& w, const Inst& i) {
  constexpr const Shape& s = kShapes[N];
  const int m = s.m, k = s.k, each = m * k * s.blocks / kLanes, groups = k / each;
  for (int block = 0; block < s.blocks; block++) {
    // cbsz and abid: one block of A serves 2^cbsz blocks.
    int a_block = i.cbsz ? (block >> i.cbsz << i.cbsz) + i.abid : block;
    auto fill = [&](int reg, int from, Elem e, bool is_a) {
      for (int l = 0; l < kLanes; l++) {
        int r = l / m, kg = r % groups, b = r / groups;
        if (b != from) continue;
        for (int n = 0; n < each; n++) {
          float x = element(w, reg, l, n, e);
          int kk = kg * each + n;
          if (is_a) gA[(l % m) * k + kk] = x;
          else gB[kk * m + l % m] = x;
        }
      }
    };
    fill(i.src[0].reg, a_block, s.a, true);
    fill(i.src[1].reg, block, s.b, false);
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
float f8f6f4_element(Wave& w, int reg, int l, int n, int code) {
  const float* t = small_tables()[code];
  if (code < 2) return t[w.reg(reg + n / 4)[l] >> (8 * (n & 3)) & 0xff];
  if (code == 4) return t[w.reg(reg + n / 8)[l] >> (4 * (n & 7)) & 0xf];
  int bit = 6 * n, word = bit >> 5;
  u64 pair = w.reg(reg + word)[l];
  if (word + 1 < 6) pair |= (u64)w.reg(reg + word + 1)[l] << 32;
  return t[pair >> (bit & 31) & 63];
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
    for (int l = 0; l < kLanes; l++) {
      int g = l / M, at = l % M;
      for (int n = 0; n < 32; n++) {
        int k = code < 2 ? (n < 16 ? 16 * g + n : K / 2 + 16 * g + n - 16) : 32 * g + n;
        float x = f8f6f4_element(w, reg, l, n, code);
        if (Scaled) x *= scale[side][k / 32][at];
        if (side == 0) gA[at * K + k] = x;
        else gB[k * M + at] = x;
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
