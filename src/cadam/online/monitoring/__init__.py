"""Reports of a running learner: console, TensorBoard, Prometheus and the status page; and checks that warn or stop."""
