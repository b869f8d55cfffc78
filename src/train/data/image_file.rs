//! Decodes PNG and JPEG images.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use zune_core::bit_depth::BitDepth;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;
use zune_png::PngDecoder;

use super::DataError;

/// The maximum size of a file in bytes.
const FILE_BYTES_MAX: u64 = 1 << 28;
/// The maximum width and height of an image in pixels.
const IMAGE_SIDE_MAX: usize = 1 << 14;
/// The maximum number of bytes of pixels for each byte of a PNG file: deflate cannot compress more.
const PNG_COMPRESSION_RATIO_MAX: usize = 1032;
/// The maximum number of pixels for each byte of a JPEG file: a block of 8 x 8 pixels needs at least one bit.
const JPEG_PIXELS_PER_BYTE_MAX: usize = 8 * 64;

/// A decoded image with one byte for each channel of each pixel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct DecodedImage {
    pub(crate) width: usize,
    pub(crate) height: usize,
    /// The number of channels: 1 for grey images, 3 (red, green, blue) for colour images.
    pub(crate) channels: usize,
    /// The pixels, row by row. The channels of a pixel follow each other.
    pub(crate) pixels: Vec<u8>,
}

/// Reads an image. The first bytes of the file tell whether the image is PNG or JPEG. The name of the file does not
/// matter. Transparency is ignored. If values have 16 bits, only their higher 8 bits are used.
///
/// # Errors
///
/// If the file cannot be read, is not a PNG or JPEG image, or is damaged.
pub(crate) fn read_image_file(path: &Path) -> Result<DecodedImage, DataError> {
    let unreadable = |error| DataError::unreadable(path, error);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(DataError::malformed(path, format!("has more than {FILE_BYTES_MAX} bytes")));
    }
    decode_image(&bytes).map_err(|problem| DataError::malformed(path, problem))
}

fn decode_image(bytes: &[u8]) -> Result<DecodedImage, String> {
    if bytes.starts_with(b"\x89PNG") {
        decode_png(bytes)
    } else if bytes.starts_with(b"\xff\xd8") {
        decode_jpeg(bytes)
    } else if bytes.is_empty() {
        Err("is empty".into())
    } else {
        Err("is not a PNG or JPEG image".into())
    }
}

/// Returns options that make the decoder refuse damaged files and images that are too large.
fn strict_options() -> DecoderOptions {
    DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(IMAGE_SIDE_MAX)
        .set_max_height(IMAGE_SIDE_MAX)
        .png_set_strip_to_8bit(true)
        .png_set_confirm_crc(true)
        .inflate_set_confirm_adler(true)
        .png_set_decode_animated(false)
}

fn describe_damage(format: &str, error: impl std::fmt::Debug) -> String {
    let text = format!("{error:?}");
    format!("is damaged, or is not a supported {format} image ({})", text.trim().trim_matches('"'))
}

fn decode_png(bytes: &[u8]) -> Result<DecodedImage, String> {
    let fail = |error| describe_damage("PNG", error);
    check_png_size(bytes)?;
    let mut decoder = PngDecoder::new_with_options(ZCursor::new(bytes), strict_options());
    let pixels = decoder.decode_raw().map_err(fail)?;
    let (Some((width, height)), Some(colors)) = (decoder.dimensions(), decoder.colorspace()) else {
        return Err("is a PNG image without a header".into());
    };
    if !matches!(decoder.depth(), Some(BitDepth::Eight | BitDepth::Sixteen)) {
        return Err("is a PNG image with an unsupported bit depth".into());
    }
    to_image((width, height), colors, pixels)
}

/// Returns an error if a PNG file is too short for the size in its header. Without this check, the decoder would
/// allocate up to 2 GiB for a file of a few bytes.
fn check_png_size(bytes: &[u8]) -> Result<(), String> {
    // The signature, a length and the name IHDR take 16 bytes. Width, height, bit depth and colour type follow.
    let header = bytes.get(16..).and_then(|header| header.first_chunk::<10>());
    let Some(&[w0, w1, w2, w3, h0, h1, h2, h3, depth, colour_type]) = header else { return Ok(()) };
    let width = u32::from_be_bytes([w0, w1, w2, w3]) as usize;
    let height = u32::from_be_bytes([h0, h1, h2, h3]) as usize;
    let channels = match colour_type {
        2 => 3,
        4 => 2,
        6 => 4,
        _ => 1,
    };
    let row_bytes = width.saturating_mul(channels * usize::from(depth)).div_ceil(8);
    if row_bytes.saturating_mul(height) > bytes.len().saturating_mul(PNG_COMPRESSION_RATIO_MAX) {
        return Err(describe_missing_bytes((width, height), bytes));
    }
    Ok(())
}

fn describe_missing_bytes((width, height): (usize, usize), bytes: &[u8]) -> String {
    format!("is damaged: its {} bytes are too few for {width} x {height} pixels", bytes.len())
}

fn decode_jpeg(bytes: &[u8]) -> Result<DecodedImage, String> {
    let fail = |error| describe_damage("JPEG", error);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), strict_options());
    decoder.decode_headers().map_err(fail)?;
    let colors = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => ColorSpace::Luma,
        Some(ColorSpace::YCbCr | ColorSpace::RGB) => ColorSpace::RGB,
        other => {
            let name = other.map_or_else(|| "unknown".to_owned(), |colors| format!("{colors:?}"));
            return Err(format!("is a JPEG image with the colours {name}; convert it to RGB"));
        }
    };
    let (width, height) = decoder.dimensions().ok_or("is a JPEG image without a header")?;
    if width.saturating_mul(height) > bytes.len().saturating_mul(JPEG_PIXELS_PER_BYTE_MAX) {
        return Err(describe_missing_bytes((width, height), bytes));
    }
    decoder.set_options(strict_options().jpeg_set_out_colorspace(colors));
    let pixels = decoder.decode().map_err(fail)?;
    let info = decoder.info().ok_or("is a JPEG image without a header")?;
    to_image((usize::from(info.width), usize::from(info.height)), colors, pixels)
}

/// Creates an image from decoded bytes: removes the transparency channel, and checks the number of bytes.
fn to_image(
    (width, height): (usize, usize),
    colors: ColorSpace,
    pixels: Vec<u8>,
) -> Result<DecodedImage, String> {
    let (channels, found) = match colors {
        ColorSpace::Luma => (1, 1),
        ColorSpace::LumaA => (1, 2),
        ColorSpace::RGB => (3, 3),
        ColorSpace::RGBA => (3, 4),
        other => return Err(format!("has the colours {other:?}; convert it to RGB")),
    };
    if width == 0 || height == 0 || pixels.len() != width * height * found {
        return Err(format!("is damaged: it has {} bytes for {width} x {height} pixels", pixels.len()));
    }
    let pixels = if channels == found {
        pixels
    } else {
        pixels.chunks(found).flat_map(|pixel| pixel[..channels].iter().copied()).collect()
    };
    Ok(DecodedImage { width, height, channels, pixels })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each entry is the name of an image, the content of its file, and the expected channels of every pixel. The channels
    /// are empty if decoding must fail. The images have 3 x 2 pixels. Pillow wrote the images with
    /// `Image.new(MODE, (3, 2), COLOUR).save(FILE)`, and with `quality=95, optimize=True` for JPEG.
    const SAMPLES: [(&str, &[u8], &[u8]); 10] = [
        ("grey.jpg", include_bytes!("images/grey.jpg"), &[100]),
        ("colour.jpg", include_bytes!("images/colour.jpg"), &[200, 50, 10]),
        ("progressive.jpg", include_bytes!("images/progressive.jpg"), &[200, 50, 10]),
        ("bit.png", include_bytes!("images/bit.png"), &[255]),
        ("la.png", include_bytes!("images/la.png"), &[100]),
        ("rgba.png", include_bytes!("images/rgba.png"), &[1, 2, 3]),
        ("sixteen.png", include_bytes!("images/sixteen.png"), &[100]),
        ("palette.png", include_bytes!("images/palette.png"), &[200, 50, 10]),
        ("palette_t.png", include_bytes!("images/palette_t.png"), &[200, 50, 10]),
        ("cmyk.jpg", include_bytes!("images/cmyk.jpg"), &[]),
    ];

    #[test]
    fn each_kind_of_image_is_decoded() {
        for (name, bytes, expected) in SAMPLES.iter().filter(|(_, _, expected)| !expected.is_empty()) {
            let image = decode_image(bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((image.width, image.height, image.channels), (3, 2, expected.len()), "{name}");
            assert_eq!(image.pixels.len(), 6 * expected.len(), "{name}");
            for (found, expected) in image.pixels.iter().zip(expected.iter().cycle()) {
                // The pixels that different JPEG decoders return may differ by 2.
                let tolerance = if name.ends_with("jpg") { 2 } else { 0 };
                assert!(found.abs_diff(*expected) <= tolerance, "{name}: {:?}", image.pixels);
            }
        }
    }

    /// Regression test: before the fix, the decoder allocated gigabytes for a short file.
    #[test]
    fn a_header_with_a_size_that_the_file_cannot_hold_is_an_error() {
        for (name, bytes, _) in SAMPLES.iter().filter(|(name, ..)| *name != "cmyk.jpg") {
            let mut changed = bytes.to_vec();
            let sides = if name.ends_with("png") {
                [16..20, 20..24]
            } else {
                // The marker of a frame is FF C0 or FF C2. A length of 2 bytes and the precision in 1 byte follow.
                let frame = bytes.windows(2).position(|pair| matches!(pair, [0xff, 0xc0 | 0xc2])).unwrap();
                [frame + 5..frame + 7, frame + 7..frame + 9]
            };
            for side in sides {
                let side = &mut changed[side];
                side.fill(0);
                let high = side.len() - 2;
                side[high] = 0x40;
            }
            let error = decode_image(&changed).unwrap_err();
            assert!(error.contains("are too few for 16384 x 16384 pixels"), "{name}: {error}");
        }
    }

    #[test]
    fn other_files_and_damaged_files_are_errors() {
        for (bytes, expected) in [
            (&b""[..], "is empty"),
            (b"GIF89a", "is not a PNG or JPEG image"),
            (SAMPLES[9].1, "colours CMYK; convert it to RGB"),
        ] {
            let error = decode_image(bytes).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        for (name, bytes, _) in SAMPLES {
            for len in (0..bytes.len() - 2).step_by(9) {
                // Decoding a truncated file must not panic, and may succeed only if more than half of the bytes are
                // left.
                let result = decode_image(&bytes[..len]);
                assert!(result.is_err() || len > bytes.len() / 2, "{name} {len}");
            }
            if name.ends_with("png") {
                for index in (0..bytes.len()).step_by(3) {
                    let mut changed = bytes.to_vec();
                    changed[index] ^= 1 << (index % 8);
                    let _ = decode_image(&changed);
                }
                let middle = bytes.len() - 20;
                let mut changed = bytes.to_vec();
                changed[middle] ^= 4;
                assert!(decode_image(&changed).is_err(), "{name}");
            }
        }
    }
}
