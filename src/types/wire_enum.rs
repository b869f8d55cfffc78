//! A macro that defines enums with a byte and a name for each variant.

/// Defines a fieldless enum that is encoded as one byte and printed in lower case.
macro_rules! wire_enum {
    (
        $(#[$meta:meta])*
        pub enum $name:ident { $( $(#[$vmeta:meta])* $variant:ident = $byte:literal => $text:literal ),+ $(,)? }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $name { $( $(#[$vmeta])* $variant = $byte ),+ }

        impl $name {
            /// All variants, in the order of their bytes on the wire.
            pub const ALL: &'static [Self] = &[ $( Self::$variant ),+ ];

            /// Returns the byte that encodes this variant on the wire.
            pub const fn to_byte(self) -> u8 { self as u8 }

            /// Returns the variant that the byte encodes, or `None` if no variant has this byte.
            pub const fn from_byte(byte: u8) -> Option<Self> {
                match byte { $( $byte => Some(Self::$variant), )+ _ => None }
            }

            /// Returns the name of this variant in options and in output.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $text ),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.pad(self.name()) }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $( $text => Ok(Self::$variant), )+
                    other => Err(format!("`{other}` is not one of {}", [$( $text ),+].join(", "))),
                }
            }
        }
    };
}

pub(super) use wire_enum;
