"""RocketMQ's gRPC protocol: .proto files of apache/rocketmq-apis, and what `scripts/rocketmq_stubs` makes of them."""
