package pgstore

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
)

// VersionSample is a version's numbers at one moment, summed over its buckets.
type VersionSample struct {
	ActivityID    string    `json:"activity_id"`
	SKUID         string    `json:"sku_id"`
	Version       int64     `json:"activity_version"`
	At            time.Time `json:"at"` // when it was written
	BucketsRead   int64     `json:"buckets_read"`
	Available     int64     `json:"available"`
	Reserved      int64     `json:"reserved"`
	ReleasedTotal int64     `json:"released_total"`
	SendPending   int64     `json:"send_pending"`
	Undecided     int64     `json:"undecided"` // members of reservation_expiry
}

// RecordSamples keeps samples, at the server's time.
func (s *Store) RecordSamples(ctx context.Context, samples []VersionSample) error {
	encoded, err := json.Marshal(samples)
	if err != nil {
		return failed("encode samples", err)
	}
	_, err = s.pool.Exec(ctx, `
		INSERT INTO seckill.version_sample (activity_id, sku_id, activity_version, buckets_read,
		                                    available, reserved, released_total, send_pending, undecided)
		SELECT activity_id, sku_id, activity_version, buckets_read, available, reserved, released_total, send_pending, undecided
		FROM jsonb_to_recordset($1::jsonb) AS s (activity_id text, sku_id text, activity_version bigint, buckets_read integer,
			available bigint, reserved bigint, released_total bigint, send_pending bigint, undecided bigint)`, encoded)
	return failed("keep samples", err)
}

// maxSamplePoints is the most samples that one chart can show.
const maxSamplePoints = 500

// VersionSamples are a version's samples of the last time, the oldest first. Of
// many it takes the newest of each equal part of that time. Samples of only
// some buckets are left out: beside whole ones they would look like a change.
func (s *Store) VersionSamples(ctx context.Context, activityID, skuID string, version int64, last time.Duration) ([]VersionSample, error) {
	return collect(ctx, s, "read samples", func(row pgx.CollectableRow) (VersionSample, error) {
		v := VersionSample{ActivityID: activityID, SKUID: skuID, Version: version}
		err := row.Scan(&v.At, &v.BucketsRead, &v.Available, &v.Reserved, &v.ReleasedTotal, &v.SendPending, &v.Undecided)
		v.At = v.At.UTC()
		return v, err
	}, `SELECT at, buckets_read, available, reserved, released_total, send_pending, undecided FROM (
			SELECT DISTINCT ON (floor(extract(epoch FROM v.at) / $5)) v.*
			FROM seckill.version_sample AS v
			JOIN seckill.scope_allocation AS a USING (activity_id, sku_id, activity_version)
			WHERE v.activity_id = $1 AND v.sku_id = $2 AND v.activity_version = $3 AND v.buckets_read = a.buckets
			  AND v.at > clock_timestamp() - $4::interval
			ORDER BY floor(extract(epoch FROM v.at) / $5), v.at DESC) AS thinned
		ORDER BY at`, activityID, skuID, version, last, last.Seconds()/maxSamplePoints)
}
