package config

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// Client is the TLS configuration of a client, nil if TLS is off. The server's
// certificate is always verified. path is that of the section, for messages.
func (t TLS) Client(path string) (*tls.Config, error) {
	if !t.Enabled {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if t.CAFile != "" {
		pem, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, fmt.Errorf("%s.ca_file: read %s: %w", path, t.CAFile, pathCause(err))
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s.ca_file: %s holds no PEM certificate", path, t.CAFile)
		}
	}
	if t.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("%s.cert_file and %s.key_file: %w", path, path, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}
