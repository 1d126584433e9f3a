package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// certificate makes a self-signed certificate for name, and its files.
func certificate(t *testing.T, name string) (certFile, keyFile string, pair tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	if pair, err = tls.X509KeyPair(certPEM, keyPEM); err != nil {
		t.Fatal(err)
	}
	return write(t, "cert.pem", string(certPEM)), write(t, "key.pem", string(keyPEM)), pair
}

// TestTLSClient makes requests to a server that demands a client certificate.
func TestTLSClient(t *testing.T) {
	serverCA, _, serverPair := certificate(t, "redis.example")
	clientCert, clientKey, clientPair := certificate(t, "daemon.example")
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	clients := x509.NewCertPool()
	clients.AddCert(clientPair.Leaf)
	server.TLS = &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{serverPair},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients,
	}
	server.StartTLS()
	defer server.Close()

	full := TLS{Enabled: true, CAFile: serverCA, CertFile: clientCert, KeyFile: clientKey, ServerName: "redis.example"}
	otherName, system, anonymous := full, full, full
	otherName.ServerName = "evil.example"
	system.CAFile = ""
	anonymous.CertFile, anonymous.KeyFile = "", ""
	for name, tt := range map[string]struct {
		tls  TLS
		fail string
	}{
		"trusted":               {full, ""},
		"other name":            {otherName, "not evil.example"},
		"authority of system":   {system, "unknown authority"},
		"no client certificate": {anonymous, "certificate required"},
	} {
		c, err := tt.tls.Client("redis.tls")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Transport{TLSClientConfig: c, DisableKeepAlives: true}).RoundTrip(req)
		if err == nil {
			resp.Body.Close()
		}
		if (err == nil) != (tt.fail == "") || (err != nil && !strings.Contains(err.Error(), tt.fail)) {
			t.Errorf("%s: %v, want %q", name, err, tt.fail)
		}
	}
}

func TestTLSFiles(t *testing.T) {
	if c, err := (TLS{}).Client("redis.tls"); c != nil || err != nil {
		t.Errorf("TLS off: %v, %v", c, err)
	}
	certFile, keyFile, _ := certificate(t, "x")
	for want, c := range map[string]TLS{
		"redis.tls.ca_file: read /nowhere: no such file":    {CAFile: "/nowhere"},
		"holds no PEM certificate":                          {CAFile: keyFile},
		"redis.tls.cert_file and redis.tls.key_file: ":      {CertFile: certFile, KeyFile: certFile},
		"redis.tls.cert_file and redis.tls.key_file: open ": {CertFile: "/nowhere", KeyFile: keyFile},
	} {
		c.Enabled = true
		if _, err := c.Client("redis.tls"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
}

// FuzzFile: no file makes Load panic, and what it accepts is valid.
func FuzzFile(f *testing.F) {
	f.Add([]byte("scanner:\n  every: 3s\nredis: {addrs: [a:1]}\n"))
	f.Add([]byte("? [a]\n: {b: &x [*x]}\nscanner: [1]\n"))
	f.Add([]byte("redis:\n  password_file: /nowhere\n  addrs:\n    - {a: b}\n"))
	f.Add([]byte("<<: {mode: act}\nmode: !!binary aGk=\nfencer: {max_release: {percent: .inf}}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		l, err := Load(Options{File: write(t, "config.yaml", string(text)), Environ: []string{}})
		if err == nil {
			if err := l.Config.Validate(); err != nil {
				t.Errorf("accepted, but %v", err)
			}
			l.Settings()
		}
	})
}
