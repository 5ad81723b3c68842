// What this CPU can do, asked at run time. Compiled without architecture flags, so that it runs anywhere.
#pragma once

namespace multihead {

struct Feature {
  const char* name;
  bool present;
};

// A fixed list for the architecture of the build, ended by an entry whose name is null.
const Feature* cpu_features();

}  // namespace multihead
