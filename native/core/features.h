// What this CPU can do, asked at run time. Compiled without architecture flags, so that it runs anywhere.
#pragma once

namespace multihead {

struct Feature {
  const char* name;
  bool present;
};

// Whether Intel has made this CPU, for whose own the libraries that torch multiplies with are tuned.
bool cpu_is_intel();

// Whether a core's first-level cache of data holds 48 KB, as since Zen 5 and Ice Lake, and not 32.
bool first_level_is_large();

// A fixed list for the architecture of the build, ended by an entry whose name is null.
const Feature* cpu_features();

}  // namespace multihead
