//! The pacing rate of links. A link without a pacing rate sends in bursts, and a switch may drop packets of a burst.
//! A link with a pacing rate sends evenly. A user who knows the bandwidth of the network can set the pacing rate.

use std::fmt;
use std::str::FromStr;

/// The lowest and the highest accepted rate, in bits per second.
const BITS_PER_SECOND_MIN: f64 = 1e5;
const BITS_PER_SECOND_MAX: f64 = 1e13;
/// The units of tc(8), in bits per second. `mbps` is not accepted, because it means megabytes per second in tc(8) and
/// megabits per second elsewhere.
const UNITS: [(&str, f64); 4] = [("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9), ("bit", 1.0)];

/// The maximum rate at which a link sends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PacingRate {
    bytes_per_second: u64,
}

impl PacingRate {
    /// Returns the rate in bytes per second.
    pub fn bytes_per_second(self) -> u64 {
        self.bytes_per_second
    }
}

impl FromStr for PacingRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate = || {
            let split = |&(unit, factor): &(&str, f64)| Some((text.strip_suffix(unit)?, factor));
            let (number, factor) = UNITS.iter().find_map(split)?;
            let is_plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
            Some(number.parse::<f64>().ok().filter(|_| is_plain)? * factor)
        };
        match rate() {
            Some(bits) if (BITS_PER_SECOND_MIN..=BITS_PER_SECOND_MAX).contains(&bits) => {
                Ok(Self { bytes_per_second: (bits / 8.0) as u64 })
            }
            Some(_) => Err(format!("`{text}` is not between 100kbit and 10000gbit")),
            None => Err(format!(
                "`{text}` is not a rate; give a number and kbit, mbit or gbit, for example 940mbit or 1.2gbit"
            )),
        }
    }
}

impl fmt::Display for PacingRate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}mbit", self.bytes_per_second as f64 * 8.0 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_in_bits_per_second() {
        for (text, bytes) in [
            ("940mbit", 117_500_000),
            ("1.2gbit", 150_000_000),
            ("100gbit", 12_500_000_000),
            ("800kbit", 100_000),
            ("8000000bit", 1_000_000),
        ] {
            assert_eq!(text.parse::<PacingRate>().unwrap().bytes_per_second(), bytes, "{text}");
        }
        for text in
            ["", "940", "mbit", "940MB", "117mbps", "1e3mbit", "-1gbit", "infgbit", "nangbit", "1.2.3gbit"]
        {
            assert!(text.parse::<PacingRate>().unwrap_err().contains("is not a rate"), "{text}");
        }
        for text in ["0gbit", "1kbit", "10001gbit"] {
            assert!(text.parse::<PacingRate>().unwrap_err().contains("is not between"), "{text}");
        }
        assert_eq!("1.2gbit".parse::<PacingRate>().unwrap().to_string(), "1200mbit");
    }
}
