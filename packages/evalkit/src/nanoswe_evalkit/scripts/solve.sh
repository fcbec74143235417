mkdir -p /solution && tar -xf - -C /solution && exec bash /solution/solve.sh
