package remoting

import (
	"context"
	"fmt"
)

// RequestConsumers asks for the clients of a consumer group that are online.
const RequestConsumers = 203

// ConsumerNotOnline is the reply when none is.
const ConsumerNotOnline = 206

// ConsumerConnections is what the online clients of a group have told a broker.
type ConsumerConnections struct {
	Connections []struct {
		ClientID string `json:"clientId"`
		Language string `json:"language"`
	} `json:"connectionSet"`
	ConsumeType   string `json:"consumeType"`
	MessageModel  string `json:"messageModel"`
	Subscriptions map[string]struct {
		ExpressionType string `json:"expressionType"`
		SubString      string `json:"subString"`
	} `json:"subscriptionTable"`
}

// Consumers lists the clients of a group that are online at the broker. None
// is no error.
func (p *Peer) Consumers(ctx context.Context, group string) (ConsumerConnections, error) {
	var found ConsumerConnections
	err := p.query(ctx, RequestConsumers, map[string]string{"consumerGroup": group}, &found)
	if IsCode(err, ConsumerNotOnline) {
		return ConsumerConnections{}, nil
	}
	if err == nil && len(found.Connections) > maxConsumeStatEntries {
		err = p.wrap(RequestConsumers, fmt.Errorf("%w: %d clients", ErrProtocol, len(found.Connections)))
	}
	return found, err
}
