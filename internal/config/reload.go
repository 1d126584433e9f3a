package config

import "reflect"

// Reload lays the settings of next that a running daemon can take over on c:
// the level of the log, rates, and policies, which are read anew for each pass.
// It lists the paths of what it took over, and of what differs and needs a
// restart, in the order of config.yaml.
func (c Config) Reload(next Config) (merged Config, taken, restart []string) {
	merged = c
	to, from := reflect.ValueOf(&merged).Elem(), reflect.ValueOf(next)
	for _, f := range fields {
		value := from.FieldByIndex(f.index)
		switch {
		case reflect.DeepEqual(to.FieldByIndex(f.index).Interface(), value.Interface()):
		case f.reload:
			to.FieldByIndex(f.index).Set(value)
			taken = append(taken, f.path)
		default:
			restart = append(restart, f.path)
		}
	}
	return merged, taken, restart
}
