#!/bin/sh
# Builds the Fast DDS peer of the interoperability tests into the folder $1, in about half a minute.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
packages="g++ fastddsgen libfastrtps-dev"

if ! dpkg -s $packages >/dev/null 2>&1; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "interop peer: needs the Debian packages $packages: sudo apt-get install $packages" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $packages >/dev/null
fi

mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$here"  # fastddsgen names its output by the path it is given
fastddsgen -replace -d "$out" ros_types.idl >"$out/fastddsgen.log" 2>&1 || { cat "$out/fastddsgen.log" >&2; exit 1; }
g++ -std=c++17 -O1 -I"$out" -o "$out/fastdds_peer.part" \
    peer.cpp "$out/ros_types.cxx" "$out/ros_typesPubSubTypes.cxx" -lfastrtps -lfastcdr
mv "$out/fastdds_peer.part" "$out/fastdds_peer"
