#!/usr/bin/env bash
# Which instructions the objects of a build have: those beyond the baseline only where a file's name says so, and there really.
# tests/opcodes.sh BUILD_DIR
set -euo pipefail
cd "$1"
bad=0
say() {
  echo "$1"
  bad=1
}
# has OBJECT WHAT PATTERN, lacks OBJECT WHAT PATTERN: whether the disassembly of OBJECT shows it.
has() { grep -qE "$3" "$asm" || say "$1 has no $2"; }
lacks() { ! grep -m 1 -nE "$3" "$asm" || say "$1 has $2"; }

asm=$(mktemp)
trap 'rm -f "$asm"' EXIT
avx='\sv[a-z0-9]+\s+.*%[xy]mm' avx512='%zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|\{%k[1-7]\}' tiles='%tmm'
n=0
while read -r object; do
  objdump -d --no-show-raw-insn "$object" >"$asm"
  n=$((n + 1))
  case ${object##*/} in
  *amx*)
    has "$object" "products of tiles" '\stdpb[us][us]d\s'
    has "$object" "loads of tiles" '\stileloadd'
    ;;
  *vnni*)
    has "$object" "VNNI" '\svpdpbusd\s'
    lacks "$object" tiles "$tiles"
    ;;
  *avx512*)
    has "$object" AVX-512 "$avx512"
    lacks "$object" tiles "$tiles"
    lacks "$object" VNNI '\svpdpbusd\s'
    ;;
  *avx2*)
    has "$object" AVX2 '%ymm'
    lacks "$object" AVX-512 "$avx512"
    ;;
  *_isa.*) lacks "$object" AVX "$avx|$avx512" ;; # tries out a tile once
  *) lacks "$object" "more than the baseline" "$avx|$avx512|$tiles" ;;
  esac
done < <(find base daemon decode deploy expertd kernels/CMakeFiles/kernels.dir model prefill proto router -name '*.c.o')
[ "$n" -gt 50 ] || say "only $n objects in $1"
[ "$bad" = 0 ] && echo "$n objects"
exit "$bad"
