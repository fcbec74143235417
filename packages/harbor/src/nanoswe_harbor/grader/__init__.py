"""The grader: log text in, verdict out. Its two modules are copied into every task's tests/."""
