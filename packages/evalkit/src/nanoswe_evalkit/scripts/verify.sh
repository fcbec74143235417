# stdin: the artifacts, which overwrite, and then the tests.
mkdir -p /logs/verifier /logs/artifacts && tar -xif - -C / --no-same-owner || exit 1
rm -f /logs/verifier/reward.*
bash /tests/test.sh
echo; echo '>>>>> Reward'
cat /logs/verifier/reward.json 2> /dev/null || cat /logs/verifier/reward.txt
