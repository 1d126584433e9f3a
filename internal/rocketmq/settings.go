package rocketmq

import "github.com/seckill/reconciler/internal/config"

// FromSettings is what the settings say. It fails if the files of TLS cannot
// be read.
func FromSettings(c config.RocketMQ) (Config, error) {
	mq := Config{
		NameServers: c.NameServers, Topic: c.Topic, ConsumerGroup: c.ConsumerGroup, Tag: c.Tag,
		ConsumerProtocol: Protocol(c.ConsumerProtocol), AccessKey: c.AccessKey, SecretKey: c.SecretKey,
		DialTimeout: c.DialTimeout, RequestTimeout: c.RequestTimeout,
		SendTimeout: c.SendTimeout, SendRate: c.SendRate, SendConcurrency: c.SendConcurrency,
		SweepMargin: c.SweepMargin, MaxSweepMessages: c.MaxSweepMessages,
	}
	var err error
	mq.TLS, err = c.TLS.Client("rocketmq.tls")
	return mq, err
}
