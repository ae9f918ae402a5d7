"""What a running learner reports: console, TensorBoard, Prometheus and the status page."""
