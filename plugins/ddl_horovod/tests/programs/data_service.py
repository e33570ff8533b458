"""A training whose batches are prepared by other processes. Each rank has a dispatcher of its own."""

import sys

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
numbers = tf.data.Dataset.range(100).map(lambda x: x)
if config.dispatcher_side == "compute":
    batches = numbers.batch(10).send_to_data_service(config, hvd.rank(), hvd.size())
    print("all", sum(int(batch.numpy().sum()) for batch in batches), flush=True)
else:
    with tf_data_service(config, hvd.rank()) as address:
        service = tf.data.experimental.service.distribute(processing_mode="distributed_epoch", service=address)
        print("all", sum(int(batch.numpy().sum()) for batch in numbers.batch(10).apply(service)), flush=True)
hvd.allreduce(tf.ones(1), name="all ranks have their data")
if hvd.rank() == 0:
    config.compute_client().shutdown()
