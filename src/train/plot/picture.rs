//! Draws a picture: a title, and charts side by side.

use std::fmt::Write as _;

use super::chart::{Chart, PlotArea, write_text};

/// The width of a chart and the height of the picture, in pixels.
const CHART_WIDTH: f64 = 520.0;
const PICTURE_HEIGHT: f64 = 420.0;
/// The height in pixels of the title line above the charts.
const TITLE_HEIGHT: f64 = 34.0;
/// A picture with n charts has a title of at most n times this number of characters.
const TITLE_CHARACTERS_PER_CHART: usize = 64;

/// Draws charts side by side below a title. Shortens a long title. If there are no charts, the picture shows
/// `text_without_charts`. Returns a complete SVG document.
pub fn draw_picture(title: &str, charts: &[Chart], text_without_charts: &str) -> String {
    let columns = charts.len().max(1);
    let width = CHART_WIDTH * columns as f64;
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{PICTURE_HEIGHT}\" viewBox=\"0 0 {width} {PICTURE_HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">"
    );
    let _ = writeln!(svg, "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>");
    let title = shorten(title, TITLE_CHARACTERS_PER_CHART * columns);
    write_text(&mut svg, (20.0, 24.0), "font-size=\"13\"", &title);
    if charts.is_empty() {
        write_text(&mut svg, (20.0, 60.0), "", text_without_charts);
    }
    for (index, chart) in charts.iter().enumerate() {
        let left = CHART_WIDTH * index as f64;
        chart.draw(
            &mut svg,
            PlotArea { left, top: TITLE_HEIGHT, width: CHART_WIDTH, height: PICTURE_HEIGHT - TITLE_HEIGHT },
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Shortens a text to at most `characters_max` characters.
fn shorten(text: &str, characters_max: usize) -> String {
    if text.chars().count() <= characters_max {
        return text.to_owned();
    }
    text.chars().take(characters_max - 3).chain("...".chars()).collect()
}
