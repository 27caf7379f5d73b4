// The C interface that gfx950_emu/build.py loads.
#include "lanes.h"

using namespace emu;

namespace emu {
std::vector<OpDef>& optable() {
  static std::vector<OpDef> table;
  return table;
}
}  // namespace emu

extern "C" {

u32 emu_sizes(int which) {
  switch (which) {
    case 0: return sizeof(Inst);
    case 1: return sizeof(LaunchDesc);
    case 2: return sizeof(Finding);
    case 3: return sizeof(Counters);
    case 4: return sizeof(DeviceModel);
    case 5: return sizeof(ScheduleDesc);
    case 6: return sizeof(FaultDesc);
    default: return 0;
  }
}
u32 emu_op_count() { return (u32)optable().size(); }
const char* emu_op_name(u32 k) { return optable()[k].name.c_str(); }
const char* emu_op_form(u32 k) { return optable()[k].form.c_str(); }
u32 emu_op_family(u32 k) { return optable()[k].family; }
u32 emu_op_extra(u32 k) { return optable()[k].extra; }

Machine* emu_create(const DeviceModel* d, const ScheduleDesc* s, u32 checks) {
  auto* m = new Machine;
  m->device = *d, m->schedule = *s, m->checks = checks;
  return m;
}
void emu_destroy(Machine* m) { delete m; }

// Regions come sorted and do not overlap.
void emu_add_region(Machine* m, u64 base, u64 size, u32 perms, u32 id) {
  m->regions.push_back({base, size, perms, id, m->lines});
  m->lines += ((base + size - 1) >> 7) - (base >> 7) + 1;
}

u32 emu_add_code(Machine* m, const Inst* insts, u32 n, u64 text_address) {
  auto c = std::make_unique<Code>();
  c->insts.assign(insts, insts + n);
  c->text_address = text_address;
  for (u32 k = 0; k < n; k++) {
    Inst& i = c->insts[k];
    const OpDef& op = optable()[i.op];
    i.extra = op.extra;
    c->handlers.push_back(op.fn);
    c->families.push_back(op.family);
    c->props.push_back((op.family == FAM_VALU || op.family == FAM_VOP3P) && op.prop == P_LANE);
    c->index_of_pc[i.pc] = k;
    if (op.family == FAM_DS && op.name.find("b32") == std::string::npos &&
        (op.name.find("8") != std::string::npos || op.name.find("16") != std::string::npos) &&
        op.name.find("b128") == std::string::npos && op.name.find("_tr_") == std::string::npos)
      c->sub_dword_lds = true;
  }
  m->codes.push_back(std::move(c));
  return (u32)m->codes.size() - 1;
}

u32 emu_add_launch(Machine* m, const LaunchDesc* d) {
  auto l = std::make_unique<Launch>();
  l->d = *d;
  l->id = (u32)m->launches.size();
  l->code = m->codes[d->code].get();
  l->total_wg = d->grid[0] * d->grid[1] * d->grid[2];
  l->counts.assign(l->code->insts.size(), 0);
  m->launches.push_back(std::move(l));
  return (u32)m->launches.size() - 1;
}

u32 emu_add_fault(Machine* m, const FaultDesc* d) {
  Fault f;
  f.d = *d;
  m->faults.push_back(f);
  return (u32)m->faults.size() - 1;
}
void emu_mark(Machine* m, u32 fault, u32 code, u32 index) {
  mark_instruction(*m, fault, code, index);
}
// Whether a fault happened; then the clock, and the rank's instructions and finished launches.
u32 emu_fault(Machine* m, u32 k, u64* out) {
  const Fault& f = m->faults[k];
  out[0] = f.clock, out[1] = f.executed, out[2] = f.launches;
  return f.fired;
}

int emu_run(Machine* m) { return run_machine(*m); }
u64 emu_executed(Machine* m) { return m->executed; }
u64 emu_clock(Machine* m) { return m->clock; }
u32 emu_finding_count(Machine* m) { return (u32)m->findings.size(); }
void emu_findings(Machine* m, Finding* out) {
  memcpy(out, m->findings.data(), m->findings.size() * sizeof(Finding));
}
void emu_counts(Machine* m, u32 launch, u64* out) {
  auto& c = m->launches[launch]->counts;
  memcpy(out, c.data(), c.size() * 8);
}
void emu_counters(Machine* m, u32 launch, Counters* out) { *out = m->launches[launch]->c; }

// One conversion, for tests.
u32 emu_encode(double x, u32 format, u32 saturate, u32 stochastic, u32 noise) {
  const Format* f[] = {&kFp8, &kBf8, &kFp6, &kBf6, &kFp4, &kF16, &kBf16};
  return encode_small(x, *f[format], saturate, stochastic ? Round::Stochastic : Round::NearestEven,
                      noise, saturate);
}
}
