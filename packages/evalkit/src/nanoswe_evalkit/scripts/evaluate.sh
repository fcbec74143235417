# stdin: the tests. The nonce is in a file that run_eval.sh removes: arguments and environments can be read.
mkdir -p "$TESTS" && tar -xf - --no-same-owner -C "$TESTS" || exit 1
if [ -s "$TESTS/model.patch" ] && ! git apply --whitespace=nowarn "$TESTS/model.patch"; then
  echo ">>>>> Model Patch Failed $(cat "$TESTS/nonce")"; exit 79
fi
# Nobody may read or trace the memory of a program that its own user may not read; root may read any.
bash=$TESTS/bash
[ "$(id -u)" != 0 ] && cp "$(command -v bash)" "$bash" && chmod 111 "$bash" || bash=bash
exec "$bash" "$TESTS/run_eval.sh"
