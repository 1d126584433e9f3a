// Command gateway is a whole flash sale gateway: POST /buy with user and
// request_id. Run it on what `make up` started; the README says how.
package main

import (
	"encoding/json"
	"flag"
	"log"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
)

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	activity, listen := flag.String("activity", "10001", "activity"), flag.String("listen", "127.0.0.1:8643", "address")
	flag.Parse()
	rdb := redis.NewUniversalClient(client.RedisOptions(&redis.UniversalOptions{Addrs: strings.Split(os.Getenv("RECONCILER_REDIS_ADDRS"), ",")}))
	catalog := must(client.NewCatalog(client.Sale{ActivityID: *activity, SKUID: "88001", Version: 1, Secret: []byte("change me")}))
	gateway := must(client.NewGateway(rdb, catalog, client.Options{}))
	servers := primitive.NewPassthroughResolver(strings.Split(os.Getenv("RECONCILER_ROCKETMQ_NAME_SERVERS"), ","))
	mq := must(rocketmq.NewProducer(producer.WithNsResolver(servers), producer.WithRetry(0))) // a retry would be a second message
	must(0, mq.Start())
	http.HandleFunc("POST /buy", func(w http.ResponseWriter, r *http.Request) {
		request := client.Request{ActivityID: *activity, SKUID: "88001", UserID: r.FormValue("user"), RequestID: r.FormValue("request_id"), Retry: r.FormValue("retry") != ""}
		result, err := gateway.Reserve(r.Context(), request)
		if err != nil {
			log.Print(err)
			_ = json.NewEncoder(w).Encode(client.ResponseTo(err, request.RequestID))
			return
		}
		if key, body, err := result.Message(); err == nil && result.Unsent() {
			message := primitive.NewMessage(os.Getenv("RECONCILER_ROCKETMQ_TOPIC"), body).WithKeys([]string{key})
			if sent, err := mq.SendSync(r.Context(), message); err == nil && sent.Status == primitive.SendOK {
				q := sent.MessageQueue
				_ = gateway.MarkEnqueued(r.Context(), result.Reservation, client.Position(q.BrokerName, q.QueueId, sent.QueueOffset, sent.OffsetMsgID))
			} else { // whatever is not noted, the daemon finds and sends
				_ = gateway.MarkSendUnknown(r.Context(), result.Reservation, "send_failed")
			}
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"code": result.Code.String(), "reservation_id": result.ReservationID})
	})
	log.Print("listening on ", *listen)
	log.Fatal((&http.Server{Addr: *listen, ReadHeaderTimeout: time.Second}).ListenAndServe())
}
