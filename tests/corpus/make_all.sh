#!/bin/bash
# Makes tests/corpus/good again: for each torch version from PyPI, a virtual environment and its cases. Each environment takes
# 3 to 6 GB (the Linux wheels include CUDA) and is then deleted unless KEEP=1.
#
#   tests/corpus/make_all.sh [VERSION ...]       default: all of them
#   WORK=/big/disk KEEP=1 OUT=/tmp/good tests/corpus/make_all.sh 2.5.1
#
# PYTHON310 and PYTHON311 name the interpreters: torch 1.13 does not import under 3.11, the others do.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${WORK:-$(mktemp -d)}
out=${OUT:-$here/good}
py310=${PYTHON310:-python3.10}
py311=${PYTHON311:-python3.11}

# The cases to keep for each version; "all" means those of 2.15.0. Each version keeps what no other one writes (see README.md).
# The total stays below 3 MB.
cases() {
	case $1 in
	1.13.1) echo fsdp1,fsdp1-optim,sharded-tensor,sharded-tensor-2d,objects,dtypes,shapes,names,strided ;;
	2.0.1) echo fsdp1-origparams,fsdp1-hsdp,fsdp1-optim,sharded-tensor,objects,flat,many-files ;;
	2.1.2) echo fsdp1,fsdp1-hsdp,fsdp1-tp,fsdp1-optim,tp,uneven,objects ;;
	2.3.1) echo fsdp1-dtensor,fsdp1-hsdp,fsdp1-tp,fsdp2,tp,empty,replicated,train ;;
	2.5.1) echo fsdp1-tp,fsdp2,2d-dp2tp2,hsdp ;;
	2.8.0) echo tp,2d-dp2tp2,hsdp-tp,train ;;
	2.15.0) echo fsdp1,fsdp1-origparams,fsdp1-optim,sharded-tensor,sharded-tensor-2d,fsdp2,tp,tp-embed,2d-dp2tp2,2d-dp4tp2,2d-uneven,hsdp,hsdp-tp,uneven,empty,replicated,shard-shard,train,objects,objects-torch,objects-foreign,dtypes,dtypes-sharded,dtypes-packed,shapes,names,tied,strided,strided-sharded,lazy-bits,many-files,threads,flat ;;
	*) echo "make_all.sh: no case list for torch $1" >&2; return 2 ;;
	esac
}

[ $# -gt 0 ] || set -- 1.13.1 2.0.1 2.1.2 2.3.1 2.5.1 2.8.0 2.15.0
for v in "$@"; do
	list=$(cases "$v")
	venv=$work/venv-$v
	if [ ! -e "$venv/ready" ]; then
		case $v in 1.*) base=$py310 ;; *) base=$py311 ;; esac
		numpy=numpy setuptools=setuptools  # 2.6 and later work with current versions
		case $v in 1.* | 2.[0-5].*) numpy='numpy<2' setuptools='setuptools<70' ;; esac
		"$base" -m venv "$venv"
		"$venv/bin/pip" install -q --no-cache-dir "torch==$v" "$numpy" "$setuptools"
		touch "$venv/ready"
	fi
	"$venv/bin/python" "$here/make_dcp.py" --strict --out "$out" --only "$list" 2>&1 | grep -v '^\[Gloo\]'
	if [ "$v" = 2.3.1 ]; then # a checkpoint that it writes wrongly, see README.md
		"$venv/bin/python" "$here/make_dcp.py" --out "$work/broken" --broken "${BAD:-$here/bad}" --only hsdp
	fi
	[ -n "${KEEP:-}" ] || rm -rf "$venv"
done
